"""What the ranks' models are and hold: comparing replicas, and making them equal."""

import itertools
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.common.agreement import check_same_lines, message_device


def named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """All parameters, then all buffers, each once: a tied parameter comes under its first name."""
    return itertools.chain(model.named_parameters(), model.named_buffers())


def modules_of(model: nn.Module) -> list[nn.Module]:
    """All modules of the model, each once, in an order of its own. Far quicker than `model.modules()`."""
    found = {id(model): model}
    ahead = [model]
    while ahead:
        new = {id(each): each for each in ahead.pop()._modules.values() if each is not None and id(each) not in found}
        found |= new
        ahead += new.values()
    return list(found.values())


def buffers_of(model: nn.Module) -> list[torch.Tensor]:
    """All buffers of the model, each once, in the same order at every call and on every rank."""
    buffers = {id(each): each for module in modules_of(model) for each in module._buffers.values() if each is not None}
    return list(buffers.values())


def why_not(model: object, group: dist.ProcessGroup | None = None, with_values: bool = True) -> str | None:
    """Say why this rank's model can't be spread over the group, or return None if it can.

    `with_values` False: it may be on the meta device, in whole or in part.
    """
    if not isinstance(model, nn.Module):
        return f"the model must be a torch.nn.Module, not {type(model).__name__}"
    backends = dist.get_backend_config(group)
    for name, tensor in named_tensors(model):
        if nn.parameter.is_lazy(tensor):
            return f"{name!r} has no shape yet: run one forward of the lazy module first"
        if tensor.is_meta and with_values:
            return f"{name!r} is on the meta device and has no values: give it some first (model.to_empty, then init)"
        if tensor.layout != torch.strided:
            return f"{name!r} is sparse; only dense parameters and buffers can be spread over ranks"
        if not tensor.is_meta and f"{tensor.device.type}:" not in backends:
            return f"{name!r} is on {tensor.device.type}, but the backend is {backends!r}: move the model first"
    return None


def describe(model: nn.Module) -> list[str]:
    """A line for each parameter and buffer with all that must be the same on every rank, values apart."""
    lines = []
    for name, tensor in named_tensors(model):
        kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
        strides = "" if tensor.is_contiguous() else f", strides {tensor.stride()}"
        frozen = ", frozen" if kind == "parameter" and not tensor.requires_grad else ""
        dtype = str(tensor.dtype).removeprefix("torch.")
        lines.append(f"{kind} {name!r}: {dtype} {tuple(tensor.shape)}{strides}{frozen}")
    return lines


def check_same_structure(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Raise ValueError on every rank unless all ranks have the same names, shapes and dtypes in the same order.

    Costs one all-gather of 32 bytes a rank; the descriptions themselves travel only where they differ.
    """
    check_same_lines(describe(model), "the ranks wrap different models; build the same one everywhere", group)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if both hold the same bytes: the same NaN is equal, 0.0 and -0.0 are not."""
    return torch.equal(_bytes(a), _bytes(b))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).contiguous().view(torch.uint8)


def difference(a: torch.Tensor, b: torch.Tensor) -> str:
    """Say how far apart two tensors are: the largest |a - b| of any element, computed in double precision."""
    wide = torch.complex128 if a.is_complex() else torch.float64
    largest = (a.detach().to(wide) - b.detach().to(wide)).abs().max().item()
    return f"by up to {largest:.3g}" if largest else "in bits alone (0.0 against -0.0)"


def broadcast_from_first(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Give every rank the first rank's values, in place: one broadcast for all tensors of one dtype and device."""
    alike: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        alike.setdefault((tensor.dtype, tensor.device), []).append(tensor.detach())
    for members in alike.values():
        flat = torch.cat([tensor.reshape(-1) for tensor in members])
        if flat.numel():
            dist.broadcast(flat, group=group, group_src=0)
        for tensor, values in zip(members, flat.split([tensor.numel() for tensor in members]), strict=True):
            tensor.copy_(values.view_as(tensor))


def complete_gradient(parameter: nn.Parameter) -> torch.Tensor:
    """Return the gradient, zeros if there was none, laid out in memory as the parameter is, alike on every rank."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    elif parameter.grad.stride() != parameter.stride():
        parameter.grad = torch.empty_like(parameter).copy_(parameter.grad)
    return parameter.grad


# FOLDED: Buffers of replicas, such as BatchNorm's statistics, kept equal: the first rank's values win.


class Buffers:
    """Remembers a model's buffers, to see which have changed since the ranks were last equal."""

    def __init__(self, model: nn.Module, group: dist.ProcessGroup | None):
        self.model, self.group = model, group
        self.remember()

    def remember(self) -> None:
        """Take the values that the buffers have now for those of all ranks."""
        self._last = [buffer.detach().clone() for buffer in buffers_of(self.model)]

    def problem(self) -> str | None:
        """Say whether the buffers are no longer those that were remembered, or return None."""
        if [buffer.shape for buffer in buffers_of(self.model)] != [buffer.shape for buffer in self._last]:
            return "buffers were added, removed or resized after the model was wrapped: wrap it again"
        return None

    def changed(self) -> list[bool]:
        """Say for each buffer whether it has changed on this rank."""
        pairs = zip(buffers_of(self.model), self._last, strict=True)
        different = [(now != before.to(now)).any().to(message_device(self.group)) for now, before in pairs]
        return torch.stack(different).tolist() if different else []

    def copy_from_first(self, which: Sequence[int]) -> None:
        """Give every rank the first rank's values of the buffers that are marked. One broadcast a dtype, if any is."""
        if any(which):
            broadcast_from_first(itertools.compress(buffers_of(self.model), which), self.group)
            self.remember()
