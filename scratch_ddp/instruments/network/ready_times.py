"""What the ranks of one machine tell each other through memory: when each was ready for each transfer.

A collective begins when its last rank is ready, which no rank can tell from the data that it receives. But the ranks of
one machine share a clock. Before it calls the process group, each rank writes into a shared file when its own wire is
free for its k-th transfer. Once that call has ended, it reads the times of the others.
"""

import contextlib
import mmap
import os
import tempfile
from collections import Counter

import torch.distributed as dist

from scratch_ddp.instruments.traffic.calls import Call

_KEPT = 2**13  # times kept in a row: far more than can be under way


class ReadyTimes:
    """The times of one group. Each pair of ranks has a row for either end; that of a rank with itself: collectives."""

    def __init__(self, group: dist.ProcessGroup):
        self._rank, self._size = group.rank(), group.size()
        self._times = share_memory(2 * self._size**2 * _KEPT, group)
        self._counts: Counter = Counter()

    def reset(self) -> None:
        """Count transfers from 0 again. Every rank does so at the same point."""
        self._counts.clear()

    def write(self, call: Call, time: float) -> int:
        """Write when this rank is ready for its next transfer. Return the transfer's number."""
        number = self._counts[_pair(call, self._rank)]
        self._counts[_pair(call, self._rank)] += 1
        self._times[self._place(call, self._rank, number)] = time
        return number

    def latest(self, call: Call, number: int) -> float:
        """Return when the last rank was ready that must be, before the transfer can begin on this rank."""
        ranks = range(self._size)
        if call.name in ("send", "recv", "broadcast", "scatter"):
            ranks = (call.rank, call.peer)
        elif call.name in ("reduce", "gather") and call.rank != call.peer:
            ranks = (call.rank,)
        return max(self._times[self._place(call, rank, number)] for rank in ranks)

    def _place(self, call: Call, rank: int, number: int) -> int:
        source, destination = _pair(call, rank)
        row = 2 * (source * self._size + destination) + (rank == destination)
        return row * _KEPT + number % _KEPT


def _pair(call: Call, rank: int) -> tuple[int, int]:
    """The ranks whose messages are numbered one after the other; all collectives of a rank are, too."""
    return {"send": (call.rank, call.peer), "recv": (call.peer, call.rank)}.get(call.name, (rank, rank))


def share_memory(count: int, group: dist.ProcessGroup | None) -> memoryview:
    """Return `count` float64 zeros that all ranks of `group` share. Raises ValueError unless all are on one machine.

    Collective: a broadcast and an all-gather of small objects. The file has no name any more when this returns.
    """
    path: list[str | None] = [None]
    if dist.get_rank(group) == 0:
        handle, path[0] = tempfile.mkstemp(prefix="scratch_ddp-link-")
        os.truncate(handle, 8 * count)  # zeros that take no room
        os.close(handle)
    try:
        dist.broadcast_object_list(path, group=group, group_src=0)
        memory = None
        with contextlib.suppress(OSError), open(path[0], "r+b") as file:
            memory = memoryview(mmap.mmap(file.fileno(), 0)).cast("d")
        found: list[bool | None] = [None] * dist.get_world_size(group)
        dist.all_gather_object(found, memory is not None, group=group)
    finally:
        if dist.get_rank(group) == 0:
            os.unlink(path[0])
    if not all(found):
        raise ValueError("a simulated link connects ranks of one machine")
    return memory
