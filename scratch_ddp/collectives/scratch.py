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

_kept = threading.local()  # by the number of the place, as attributes


def scratch_like(tensor: torch.Tensor, place: int = 0) -> torch.Tensor:
    """Uninitialised memory for a contiguous tensor. Within a call, what is needed at once has a `place` of its own."""
    if tensor.device.type != "cpu":
        return torch.empty_like(tensor)
    block = vars(_kept).get(str(place))
    if block is None or len(block) < tensor.nbytes:
        block = vars(_kept)[str(place)] = torch.empty(tensor.nbytes, dtype=torch.uint8)
    return block[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)


@contextlib.contextmanager
def scratch_memory() -> Iterator[None]:
    """Around a call: keeps what it has taken, unless that is too much, or a receive may still write into it."""
    finished = False
    try:
        yield
        finished = True
    finally:
        if not finished or sum(map(len, vars(_kept).values())) > MOST:
            vars(_kept).clear()
