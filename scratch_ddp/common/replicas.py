"""Replicas of a model: what they consist of, what can't be replicated, whether they are equal, making them equal."""

import itertools
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.common.accounting import set_up
from scratch_ddp.common.agreement import gather_texts, message_device
from scratch_ddp.common.tensors import bytes_of, copy_back, flatten, group_alike


def named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """All parameters, then all buffers, each once: a tied parameter comes under its first name."""
    return itertools.chain(model.named_parameters(), model.named_buffers())


def modules_of(model: nn.Module) -> list[nn.Module]:
    """All modules of the model, each once, always in the same order. Much faster than `model.modules()`."""
    found = {id(model): model}
    ahead = [model]
    while ahead:
        new = {id(each): each for each in ahead.pop()._modules.values() if each is not None and id(each) not in found}
        found |= new
        ahead += new.values()
    return list(found.values())


def model_problem(model: object, group: dist.ProcessGroup | None = None, with_values: bool = True) -> str | None:
    """What keeps this rank's model from being spread over the group.

    `with_values` False: it may be on the meta device, in whole or in part.
    """
    if not isinstance(model, nn.Module):
        return f"the model must be a torch.nn.Module, not {type(model).__name__}"
    backends = dist.get_backend_config(group)
    problems = (tensor_problem(repr(name), each, backends, with_values) for name, each in named_tensors(model))
    return next(filter(None, problems), None)


def tensor_problem(name: str, tensor: torch.Tensor, backends: str, with_values: bool = True) -> str | None:
    """What keeps a tensor from being sent to other ranks. `name`: what the message calls it. `backends`: the group's.

    `with_values` False: it may be on the meta device.
    """
    if nn.parameter.is_lazy(tensor):
        return f"{name} has no shape yet: run one forward of the lazy module first"
    if tensor.is_meta and with_values:
        return f"{name} is on the meta device and has no values: allocate and initialise it first (model.to_empty)"
    if tensor.layout != torch.strided:
        return f"{name} is sparse; only dense parameters and buffers can be sent to other ranks"
    if not tensor.is_meta and f"{tensor.device.type}:" not in backends:
        return f"{name} is on {tensor.device.type}, but the backend is {backends!r}: move the model first"
    return None


def gradient_problem(name: str, gradient: torch.Tensor) -> str | None:
    """What keeps a gradient from being averaged over the ranks. `name`: what the message calls its parameter."""
    if gradient.layout != torch.strided:
        return f"the gradient of {name} is sparse; only dense gradients can be averaged (sparse=False)"
    if gradient.requires_grad:
        return f"the gradient of {name} has a graph of its own: no double backward through a mean over ranks"
    return None


def describe(model: nn.Module) -> list[str]:
    """A line for each parameter and buffer with all that must be the same on every rank, except the values."""
    lines = []
    for name, tensor in named_tensors(model):
        kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
        strides = "" if tensor.is_contiguous() else f", strides {tensor.stride()}"
        frozen = ", frozen" if kind == "parameter" and not tensor.requires_grad else ""
        dtype = str(tensor.dtype).removeprefix("torch.")
        lines.append(f"{kind} {name!r}: {dtype} {tuple(tensor.shape)}{strides}{frozen}")
    return lines


def difference(a: torch.Tensor, b: torch.Tensor) -> str | None:
    """Say how far apart two tensors are; None if they hold the same bits. The same NaN is equal, 0.0 and -0.0 are not.

    That is the largest |a - b| of any element, computed in double precision.
    """
    if torch.equal(bytes_of(a), bytes_of(b)):
        return None
    wide = torch.complex128 if a.is_complex() else torch.float64
    largest = (a.detach().to(wide) - b.detach().to(wide)).abs().max().item()
    return f"by up to {largest:.3g}" if largest else "in bits alone (0.0 against -0.0)"


def broadcast_from_first(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Give every rank the first rank's values, in place. One broadcast per dtype and device, counted as set-up."""
    for alike in group_alike(tensor.detach() for tensor in tensors):
        flat = flatten(alike)
        if flat.numel():
            with set_up():
                dist.broadcast(flat, group=group, group_src=0)
            copy_back(flat, alike)


def complete_gradient(parameter: nn.Parameter) -> torch.Tensor:
    """Return the gradient, or zeros if there was none, with the parameter's strides, which every rank shares."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    elif parameter.grad.stride() != parameter.stride():
        parameter.grad = torch.empty_like(parameter).copy_(parameter.grad)
    return parameter.grad


class RegisteredParameters:
    """The parameter under each name of each module when the model was wrapped; a tied one several times."""

    def __init__(self, model: nn.Module):
        self.model = model
        self._when_wrapped = self._now()

    def problem(self) -> str | None:
        """Say that they are no longer the same, or return None."""
        if [id(each) for each in self._now()] != [id(each) for each in self._when_wrapped]:
            return "parameters were added, removed, replaced or tied after the model was wrapped: wrap it again"
        return None

    def _now(self) -> list[nn.Parameter | None]:
        return [each for module in modules_of(self.model) for each in module._parameters.values()]


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that a state dict holds, each by a line that says where it is and what it is like."""
    return {
        f"{number}.{name} {buffer.dtype} {tuple(buffer.shape)}": buffer
        for number, module in enumerate(modules_of(model))
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }


def buffers_from_first(buffers: dict[str, torch.Tensor], group: dist.ProcessGroup | None, alike: bool) -> None:
    """Give every rank the first rank's values of the `buffers`, which are `alike` on all ranks or not.

    Those that are not, because they grow or appear, say, stay each rank's own. One broadcast per dtype, and two small
    all-gathers where they are not alike.
    """
    names = set(buffers)
    if not alike:
        names = set.intersection(*(set(text.splitlines()) for text in gather_texts("\n".join(buffers), group)))
    broadcast_from_first([buffers[name] for name in sorted(names)], group)


def buffers_of(model: nn.Module) -> list[torch.Tensor]:
    """All buffers of the model, each once, in the same order at every call and on every rank."""
    buffers = {id(each): each for module in modules_of(model) for each in module._buffers.values() if each is not None}
    return list(buffers.values())


class Buffers:
    """A model's buffers, such as BatchNorm's statistics, kept equal over the ranks: the first rank's values count.

    It remembers the values that all ranks had last, and so knows which have changed since.
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup | None):
        self.model, self.group = model, group
        self.remember()
        self.count = len(self._last)

    def remember(self) -> None:
        """Take the present values for those of all ranks."""
        self._last = [buffer.detach().clone() for buffer in buffers_of(self.model)]

    def problem(self) -> str | None:
        """Say that they are no longer the buffers that were remembered, or return None."""
        if [buffer.shape for buffer in buffers_of(self.model)] != [buffer.shape for buffer in self._last]:
            return "buffers were added, removed or resized after the model was wrapped: wrap it again"
        return None

    def changed(self) -> list[bool]:
        """Say for each buffer whether it has changed on this rank."""
        pairs = zip(buffers_of(self.model), self._last, strict=True)
        different = [(now != before.to(now)).any().to(message_device(self.group)) for now, before in pairs]
        return torch.stack(different).tolist() if different else []

    def copy_from_first(self, which: Sequence[int]) -> None:
        """Give every rank the first rank's values of the marked buffers. One broadcast per dtype, if any is marked."""
        if any(which):
            broadcast_from_first(itertools.compress(buffers_of(self.model), which), self.group)
            self.remember()
