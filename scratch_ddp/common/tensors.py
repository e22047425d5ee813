"""Tensors as messages: which can share one, how they are packed and unpacked; and messages that autograd follows."""

import hashlib
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

MB = 2**20  # bytes
LARGE = MB  # of a tensor that travels alone, without being copied
# Torch's names since 2.13, before them the older ones.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
Move = Callable[[torch.Tensor], torch.Tensor]


def group_alike(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Split tensors into groups of one dtype and device, which can share a message. Order is kept, also of groups."""
    groups: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return list(groups.values())


def split_into_messages(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Split what one rank sends into messages: each large tensor alone, small ones of a dtype and device together."""
    tensors = [tensor for tensor in tensors if tensor.numel()]
    alone = [[tensor] for tensor in tensors if tensor.nbytes >= LARGE]
    return [*alone, *group_alike(tensor for tensor in tensors if tensor.nbytes < LARGE)]


def flatten(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """All elements of tensors of one dtype and device, in one dimension: a copy; of one contiguous tensor a view."""
    if len(tensors) == 1 and tensors[0].is_contiguous():
        return tensors[0].view(-1)
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def unflatten(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Views of what `flatten` made of such tensors, each with the shape of its tensor."""
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]


def copy_back(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Put the elements of `flat` back into the tensors that `flatten` made it of."""
    if flat.data_ptr() == tensors[0].data_ptr():  # a view: they are there already
        if not tensors[0].is_inference():
            torch.autograd.graph.increment_version(tensors[0])  # autograd notices the change, as it does with copy_
        return
    with torch.inference_mode():  # a rank that evaluates may have made its buffers in it
        for tensor, part in zip(tensors, unflatten(flat, tensors), strict=True):
            tensor.copy_(part)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes, uint8 in one dimension: a view, or a copy where its memory is not contiguous."""
    return tensor.detach().reshape(-1).contiguous().view(torch.uint8)


def checksum(tensor: torch.Tensor) -> str:
    """A text that stands for the tensor's values, bit by bit."""
    return f"checksum {hashlib.sha256(bytes_of(tensor).cpu().numpy()).hexdigest()[:12]}"


def conjugate(tensor: torch.Tensor, forward: Move, backward: Move) -> torch.Tensor:
    """Return `forward(tensor)`; its gradient is `backward(gradient)`.

    Both may communicate, so every rank must call this alike and run the backward. A second derivative raises
    RuntimeError.
    """
    return _Conjugate.apply(tensor, forward, backward)


class _Conjugate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, forward, backward):
        ctx.backward_move = backward
        return forward(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        return ctx.backward_move(gradient), None, None
