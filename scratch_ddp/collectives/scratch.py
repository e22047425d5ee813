"""Scratch memory: what collectives receive into, kept from call to call.

Fresh memory is slow: the system stops a process at its first write to each page, and for large tensors these stops take
longer than the message itself. So each thread keeps one block of memory, and `scratch_like` hands out parts of it. A
GPU's memory is kept by torch's own allocator.
"""

import contextlib
import threading
from collections.abc import Iterator

import torch

MOST = 2**29  # bytes that a thread keeps; a call that takes more gives it back
_ALIGNED = 64  # bytes: a cache line, and a multiple of every dtype's size


class _Pool(threading.local):
    block = torch.empty(0, dtype=torch.uint8)
    taken: int | None = None  # bytes asked for inside `scratch_memory`; None outside


_pool = _Pool()


def scratch_like(tensor: torch.Tensor) -> torch.Tensor:
    """Uninitialised memory for a contiguous tensor: on the CPU and inside `scratch_memory`, to be used there only."""
    if _pool.taken is None or tensor.device.type != "cpu":
        return torch.empty_like(tensor)
    begin, end = _pool.taken, _pool.taken + tensor.nbytes
    _pool.taken = -(-end // _ALIGNED) * _ALIGNED
    fits = end <= len(_pool.block)
    return _pool.block[begin:end].view(tensor.dtype).view(tensor.shape) if fits else torch.empty_like(tensor)


@contextlib.contextmanager
def scratch_memory() -> Iterator[None]:
    """Around a call: what `scratch_like` hands out is kept memory, free again at the end."""
    _pool.taken = 0
    try:
        yield
        if len(_pool.block) < _pool.taken <= MOST:
            _pool.block = torch.empty(_pool.taken, dtype=torch.uint8)
    except BaseException:
        _pool.block = _Pool.block  # a receive that was interrupted may still write into the old one
        raise
    finally:
        _pool.taken = None
