"""Scratch memory: what collectives receive into, kept from call to call.

Fresh memory is slow: the system stops a process at its first write to each page, and for large tensors these stops take
longer than the message itself. So each thread keeps what it has received into. A GPU's memory is kept by torch's own
allocator.
"""

import contextlib
import threading
from collections.abc import Iterator

import torch

MOST = 2**29  # bytes that a thread keeps; a call that takes more gives all back


class _Kept(threading.local):
    def __init__(self) -> None:
        self.blocks: dict[int, torch.Tensor] = {}  # by the number of the place
        self.in_a_call = False


_kept = _Kept()


def scratch_like(tensor: torch.Tensor, place: int = 0) -> torch.Tensor:
    """Uninitialised memory for a contiguous tensor: on the CPU and inside `scratch_memory`, to be used there only.

    Within a call, what is needed at once has a `place` of its own.
    """
    if tensor.device.type != "cpu" or not _kept.in_a_call:
        return torch.empty_like(tensor)
    if place not in _kept.blocks or len(_kept.blocks[place]) < tensor.nbytes:
        _kept.blocks[place] = torch.empty(tensor.nbytes, dtype=torch.uint8)
    return _kept.blocks[place][: tensor.nbytes].view(tensor.dtype).view(tensor.shape)


@contextlib.contextmanager
def scratch_memory() -> Iterator[None]:
    """Around a call: keeps what it has taken, unless that is too much, or a receive may still write into it."""
    _kept.in_a_call, finished = True, False
    try:
        yield
        finished = True
    finally:
        _kept.in_a_call = False
        if not finished or sum(map(len, _kept.blocks.values())) > MOST:
            _kept.blocks.clear()
