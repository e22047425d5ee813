"""When each rank of a group was ready for each transfer, shared by all ranks of a machine.

A collective begins when its last rank is ready, which no rank can tell from the data that it receives. The ranks of one
machine share a clock, and through this module a file in memory. Each rank writes the time at which its own wire is free
for its k-th transfer before it calls the process group. Once that call has ended, it reads the times of the others,
which they wrote before their calls.
"""

import mmap
import os
import tempfile
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import torch.distributed as dist

from scratch_ddp.instruments.traffic.calls import Call

_COLLECTIVES, _MESSAGES = 2**16, 2**11  # times kept per rank, and per pair; far more than can be under way
_BYTES = 8  # a time is a float64
_PER_RESET = 2**40  # more than the transfers between two resets


class Numbered(NamedTuple):
    """The k-th transfer of its row: the places of the times it depends on, and of what its ranks have agreed on."""

    places: list[int]
    agreed: int
    number: int


class ReadyTimes:
    """The times of one group. Each rank has a row for collectives, and each pair of ranks a row for either end.

    In one row more, the first rank to find out when a transfer has a network card leaves this for the others.
    """

    def __init__(self, rank: int, size: int, memory: mmap.mmap):
        self._rank, self._size = rank, size
        self._times = memoryview(memory).cast("d")
        self._counts: Counter = Counter()
        self._resets = 0

    def reset(self) -> None:
        """Count transfers from 0 again. Every rank does so at the same point."""
        self._counts.clear()
        self._resets += 1

    def write(self, call: Call, time: float) -> Numbered:
        """Write when this rank is ready for its next transfer."""
        row = _row(call)
        number = self._counts[row]
        self._counts[row] += 1
        self._times[self._place(row, number, self._rank)] = time
        places = [self._place(row, number, rank) for rank in _awaited(call)]
        return Numbered(places, self._agreed(row, number), 1 + number + self._resets * _PER_RESET)

    def undo(self, call: Call) -> None:
        """Undo `write` for a call that failed to start."""
        self._counts[_row(call)] -= 1

    def latest(self, transfer: Numbered) -> float:
        """Return the latest of the times that the transfer depends on, as far as they are written."""
        return max(self._times[place] for place in transfer.places)

    def agreed(self, transfer: Numbered) -> float | None:
        """Return what the first rank has left for the others, if any has. To be called by one rank at a time."""
        number, time = self._times[transfer.agreed], self._times[transfer.agreed + 1]
        return time if number == transfer.number else None

    def agree(self, transfer: Numbered, time: float) -> None:
        """Leave a time for the other ranks."""
        self._times[transfer.agreed + 1] = time
        self._times[transfer.agreed] = transfer.number

    def _place(self, row: tuple[int, int] | None, number: int, rank: int) -> int:
        if row is None:
            return rank * _COLLECTIVES + number % _COLLECTIVES
        source, destination = row
        end = 2 * (source * self._size + destination) + (rank == destination)
        return self._size * _COLLECTIVES + end * _MESSAGES + number % _MESSAGES

    def _agreed(self, row: tuple[int, int] | None, number: int) -> int:
        begin = self._size * _COLLECTIVES + 2 * self._size**2 * _MESSAGES
        if row is None:
            return begin + 2 * (number % _COLLECTIVES)
        pair = row[0] * self._size + row[1]
        return begin + 2 * (_COLLECTIVES + pair * _MESSAGES + number % _MESSAGES)


def _row(call: Call) -> tuple[int, int] | None:
    """Messages are numbered per (source, destination), all collectives together (None)."""
    return {"send": (call.rank, call.peer), "recv": (call.peer, call.rank)}.get(call.name)


def _awaited(call: Call) -> Iterable[int]:
    """The ranks that must be ready before the transfer can begin on this rank."""
    if call.name in ("send", "recv", "broadcast", "scatter"):
        return {call.rank, call.peer}
    if call.name in ("reduce", "gather") and call.rank != call.peer:
        return {call.rank}
    return range(len(call.members))


def share_ready_times(group: dist.ProcessGroup) -> ReadyTimes | None:
    """Return ready times shared by all ranks of `group`, or None on every rank unless all are on one machine.

    Collective: a broadcast and an all-gather of small objects. The file has no name any more when this returns.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    memory = share_memory(_BYTES * ((size + 2) * _COLLECTIVES + 4 * size * size * _MESSAGES), group)
    return memory and ReadyTimes(rank, size, memory)


def share_memory(length: int, group: dist.ProcessGroup | None) -> mmap.mmap | None:
    """Return zeros, and behind them a few bytes more, shared by all ranks of `group`; or None on every rank.

    Collective, as `share_ready_times`.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    path = [_make_file(length) if rank == 0 else None]
    try:
        dist.broadcast_object_list(path, group=group, group_src=0)
        memory = _map(path[0])
        marks: list[bytes | None] = [None] * size
        dist.all_gather_object(marks, memory and memory[length:], group=group)
    finally:
        if rank == 0 and path[0]:
            os.unlink(path[0])
    return None if None in marks or len(set(marks)) > 1 else memory


def _make_file(length: int) -> str | None:
    """Make a sparse file of zeros and, behind them, a mark that no other file has. Return its path, or None."""
    try:
        handle, path = tempfile.mkstemp(prefix="scratch_ddp-link-")
        with open(handle, "r+b") as file:
            file.seek(length)
            file.write(os.urandom(_BYTES))
        return path
    except OSError:
        return None


def _map(path: str | None) -> mmap.mmap | None:
    try:
        with open(path or "", "r+b") as file:
            return mmap.mmap(file.fileno(), 0)
    except (OSError, ValueError):
        return None
