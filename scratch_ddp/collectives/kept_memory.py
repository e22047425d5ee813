"""Memory that a collective takes for what arrives, kept for the next call.

Fresh memory is slow: the first write to each page stops for the operating system, and at large sizes that takes longer
than the message itself. The collectives are written with `torch.empty_like`, as anyone would write them; inside a
`KeptMemory` block it hands out parts of one block that stays. A GPU's memory is kept by torch's own allocator.
"""

import threading
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

MOST = 2**29  # bytes that a thread keeps; what takes more is given back after the call
_ALIGNED = 64  # bytes: a cache line, and a multiple of every dtype's size


class _Thread(threading.local):
    block = torch.empty(0, dtype=torch.uint8)
    used = 0  # bytes of it, by the blocks that this thread is in


_thread = _Thread()


class KeptMemory(TorchFunctionMode):
    """Inside, `torch.empty_like` of a contiguous CPU tensor gives kept memory. It must not be used after the block."""

    def __enter__(self) -> "KeptMemory":
        self._before, self._needed = _thread.used, _thread.used
        return super().__enter__()

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is torch.empty_like and not kwargs and args[0].device.type == "cpu" and args[0].is_contiguous():
            return self._take(args[0])
        return func(*args, **(kwargs or {}))

    def _take(self, like: torch.Tensor) -> torch.Tensor:
        begin, size = self._needed, like.numel() * like.element_size()
        self._needed += -(-size // _ALIGNED) * _ALIGNED
        if self._needed > len(_thread.block):
            return torch.empty_like(like)
        _thread.used = self._needed
        return _thread.block[begin : begin + size].view(like.dtype).view(like.shape)

    def __exit__(self, kind: Any, error: Any, where: Any) -> None:
        super().__exit__(kind, error, where)
        _thread.used = self._before
        if kind is not None:
            _thread.block = _Thread.block  # a receive that was given up may still write into the old one
        elif len(_thread.block) < self._needed <= MOST and not self._before:
            _thread.block = torch.empty(self._needed, dtype=torch.uint8)
