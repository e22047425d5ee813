"""Memory that was freed and is read all the same: torch does not look, and the process would end."""

import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from scratch_ddp.instruments.traffic.intercept import LightMode

# These look at sizes only, or give a tensor other memory.
_BY_SIZE = ("empty", "zeros", "ones", "full", "rand", "new_", "resize", "set_", "is_same_size", "sym_")


class FreedMemoryRefused(LightMode):
    """Refuses, inside the block, each operation on a tensor whose memory was freed."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        refuse_freed(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def refuse_freed(func: torch._ops.OpOverload, args: Iterable[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise RuntimeError if the operation reads or writes beyond the memory of one of these tensors."""
    if _leaves_memory_alone(func):
        return
    for tensor in _tensors([*args, *kwargs.values()]):
        if is_freed(tensor):
            name = func._schema.name.partition("::")[2]
            raise RuntimeError(f"{name} is called on a tensor whose memory has been freed")


def is_freed(tensor: torch.Tensor) -> bool:
    """Its storage was resized, so that it ends before the tensor does."""
    numel = tensor.numel()
    if not numel:
        return False
    last = numel - 1
    if not tensor.is_contiguous():
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.untyped_storage().nbytes() < (tensor.storage_offset() + last + 1) * tensor.itemsize


@functools.cache
def _leaves_memory_alone(func: torch._ops.OpOverload) -> bool:
    return func.is_view or func._schema.name.partition("::")[2].startswith(_BY_SIZE)


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
