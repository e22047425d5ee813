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
    taken: int | None = None  # bytes asked for in the `scratch_memory` blocks that the thread is in; None outside


_pool = _Pool()


def scratch_like(tensor: torch.Tensor) -> torch.Tensor:
    """Uninitialised memory as of torch.empty_like; inside `scratch_memory` it is kept memory, to be used there only.

    Of a tensor that is not contiguous or not on the CPU, and beyond the end of what is kept, it is fresh memory.
    """
    if _pool.taken is None or tensor.device.type != "cpu" or not tensor.is_contiguous():
        return torch.empty_like(tensor)
    begin, size = _pool.taken, tensor.nbytes
    _pool.taken += -(-size // _ALIGNED) * _ALIGNED
    if _pool.taken > len(_pool.block):
        return torch.empty_like(tensor)
    return _pool.block[begin : begin + size].view(tensor.dtype).view(tensor.shape)


@contextlib.contextmanager
def scratch_memory() -> Iterator[None]:
    """Inside, `scratch_like` hands out kept memory; at the end it is free again. A block inside a block takes other."""
    before = _pool.taken
    _pool.taken = before or 0
    try:
        yield
        if before is None and len(_pool.block) < _pool.taken <= MOST:
            _pool.block = torch.empty(_pool.taken, dtype=torch.uint8)
    except BaseException:
        _pool.block = _Pool.block  # a receive that was interrupted may still write into the old one
        raise
    finally:
        _pool.taken = before
