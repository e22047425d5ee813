"""Replicas of a model: what they consist of, whether they are equal, making them equal."""

import itertools
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.common.accounting import set_up
from scratch_ddp.common.tensors import bytes_of, copy_back, flatten, split_into_messages

OTHER_BUFFERS = (
    "the ranks hold different buffers, or of other shapes, so that they can't become the first rank's: register a "
    "cache that grows on each rank by itself with persistent=False"
)


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
        part = f", slice {dist.get_rank(tensor.sliced_over)}" if hasattr(tensor, "sliced_over") else ""
        lines.append(f"{kind} {name!r}: {dtype_and_shape(tensor)}{strides}{frozen}{part}")
    return lines


def dtype_and_shape(tensor: torch.Tensor) -> str:
    """As in "float32 (2, 3)"."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that a state dict holds, each by a line that says where it is and what it is like."""
    return {
        f"{number}.{name} {dtype_and_shape(buffer)}": buffer
        for number, module in enumerate(modules_of(model))
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }


def broadcast_from_first(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Give every rank the first rank's values, in place. Costs what `broadcast_shares` does, counted as set-up."""
    with set_up():
        broadcast_shares([tensors], group)


@torch.no_grad()
def broadcast_shares(shares: Sequence[Iterable[torch.Tensor]], group: dist.ProcessGroup | None = None) -> None:
    """Give every rank the values that rank r of the group has in the tensors of `shares[r]`, in place.

    Cost: a broadcast for each tensor of 1 MB or more, and for each rank and dtype one for all smaller ones. On a ring
    a rank sends (n - 1)/n of all bytes if the shares are equal. Memory while it runs: a copy of all small tensors
    and of those that are not contiguous. What travels are bytes: gloo can't send every dtype.
    """
    works = []
    for owner, tensors in enumerate(shares):
        for message in split_into_messages(tensor.detach() for tensor in tensors):
            flat = flatten(message)
            works.append((dist.broadcast(bytes_of(flat), group=group, group_src=owner, async_op=True), flat, message))
    for work, flat, message in works:
        work.wait()
        copy_back(flat, message)


def complete_gradient(parameter: nn.Parameter) -> torch.Tensor:
    """Return the gradient, or zeros if there was none, with the parameter's strides, which every rank shares."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    elif parameter.grad.stride() != parameter.stride():
        parameter.grad = torch.empty_like(parameter).copy_(parameter.grad)
    return parameter.grad
