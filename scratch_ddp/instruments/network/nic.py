"""One rank's end of the link: transfers queue for it as they do for a network card."""

import contextlib
import mmap
import os
import tempfile
import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch.distributed as dist

from scratch_ddp.instruments.traffic.calls import Call

_KEPT = 200_000  # transfers that are remembered, at most; the older half is forgotten beyond


@dataclass
class Transfer:
    """A collective or message on the wire.

    Times are in seconds of time.monotonic, which all processes of a machine share, as the link's clock shows them (see
    `sleep`: up to 20 ms earlier on a busy machine). `started` and `ended` are this rank's own forecast until the
    transfer is waited for: a peer may come later.
    """

    call: str  # "all_reduce", "send", …
    nbytes: int  # that this rank sends or receives, whichever is more
    posted: float
    started: float
    ended: float


class Nic:
    """Carries one transfer at a time in each direction; a collective takes both, a message one."""

    def __init__(self) -> None:
        self.transfers: list[Transfer] = []  # in the order in which they were posted
        self._free = {"out": 0.0, "in": 0.0}
        self._settled: dict[str, tuple[float, float]] = {}  # from when to when sends and receives last took the wire
        self._lock = threading.Lock()

    def book(self, call: str, nbytes: int, posted: float, seconds: float) -> Transfer:
        """Queue a transfer that was asked for at `posted` and takes the wire for `seconds`."""
        with self._lock:
            directions = _directions(call)
            started = max(posted, *(self._free[direction] for direction in directions))
            transfer = Transfer(call, nbytes, posted, started, started + seconds)
            self._keep_taken(directions, transfer.ended)
            self.transfers.append(transfer)
            if len(self.transfers) > _KEPT:
                del self.transfers[: _KEPT // 2]
        return transfer

    def put_off(self, transfer: Transfer, ready: float) -> None:
        """Let a transfer begin no earlier than `ready`: the moment at which the last of its ranks was."""
        with self._lock:
            started, seconds = max(transfer.started, ready), transfer.ended - transfer.started
            if transfer.call in ("send", "recv"):  # messages that were all put off still go one after the other
                taken_from, taken_until = self._settled.get(transfer.call, (0.0, 0.0))
                if started < taken_until and started + seconds > taken_from:
                    started = taken_until
                else:
                    taken_from = started
                self._settled[transfer.call] = taken_from, started + seconds
            transfer.started, transfer.ended = started, started + seconds
            self._keep_taken(_directions(transfer.call), transfer.ended)

    def forget(self, transfer: Transfer) -> None:
        """Take back a transfer that did not come about."""
        with self._lock:
            with contextlib.suppress(ValueError):  # the list is its users', who may have emptied it
                self.transfers.remove(transfer)
            for direction in _directions(transfer.call):
                if self._free[direction] == transfer.ended:
                    self._free[direction] = transfer.started

    def clear_queue(self) -> None:
        """Free the wire from now on: what was under way has been given up."""
        with self._lock:
            self._free = dict.fromkeys(self._free, 0.0)
            self._settled.clear()

    @property
    def busy_seconds(self) -> float:
        """Seconds for which the wire was taken, in either direction, by the transfers that are remembered."""
        with self._lock:
            spans = sorted((transfer.started, transfer.ended) for transfer in self.transfers)
        busy, until = 0.0, 0.0
        for started, ended in spans:
            busy += max(0.0, ended - max(started, until))
            until = max(until, ended)
        return busy

    def _keep_taken(self, directions: tuple[str, ...], until: float) -> None:
        for direction in directions:
            self._free[direction] = max(self._free[direction], until)


def _directions(call: str) -> tuple[str, ...]:
    return {"send": ("out",), "recv": ("in",)}.get(call, ("out", "in"))


# FOLDED: When each rank of a group was ready for each transfer, for all ranks of a machine to see.
#
# A collective begins when the last rank is ready for it, and no rank knows the others' clocks' readings from the data it
# gets. On one machine they share a clock, and this file in shared memory: each rank writes the moment at which its own
# wire is free for its k-th transfer before it calls the process group, and reads the others' once that call is through,
# which is after they have written theirs.

_COLLECTIVES, _MESSAGES = 2**16, 2**11  # moments kept for each rank, for each pair; far more than can be under way
_BYTES = 8  # a moment is a float64


class Board:
    """Moments of the ranks of one group. Each rank has a row for collectives; each pair of ranks one for either end."""

    def __init__(self, rank: int, size: int, memory: mmap.mmap):
        self._rank, self._size = rank, size
        self._moments = memoryview(memory).cast("d")
        self._counts: Counter = Counter()

    def start_over(self) -> None:
        """Count transfers from 0 again. Every rank does so at the same point."""
        self._counts.clear()

    def ready(self, call: Call, moment: float) -> list[int]:
        """Note when this rank is ready for its next transfer; return where the moments are that it depends on."""
        row = _row(call)
        number = self._counts[row]
        self._counts[row] += 1
        self._moments[self._place(row, number, self._rank)] = moment
        return [self._place(row, number, rank) for rank in _awaited(call)]

    def take_back(self, call: Call) -> None:
        """Undo `ready` for a call that did not come about."""
        self._counts[_row(call)] -= 1

    def begins(self, places: list[int]) -> float:
        """Return the last of these moments, as far as the ranks have noted theirs."""
        return max(self._moments[place] for place in places)

    def _place(self, row: tuple[int, int] | None, number: int, rank: int) -> int:
        if row is None:
            return rank * _COLLECTIVES + number % _COLLECTIVES
        source, destination = row
        end = 2 * (source * self._size + destination) + (rank == destination)
        return self._size * _COLLECTIVES + end * _MESSAGES + number % _MESSAGES


def _row(call: Call) -> tuple[int, int] | None:
    """Messages are numbered for each (source, destination), collectives all together (None)."""
    return {"send": (call.rank, call.peer), "recv": (call.peer, call.rank)}.get(call.name)


def _awaited(call: Call) -> Iterable[int]:
    """The ranks that must be ready before the call's transfer can begin on this rank."""
    if call.name in ("send", "recv", "broadcast", "scatter"):
        return {call.rank, call.peer}
    if call.name in ("reduce", "gather") and call.rank != call.peer:
        return {call.rank}
    return range(len(call.members))


def shared_board(group: dist.ProcessGroup) -> Board | None:
    """Give all ranks of `group` one board, or None on every rank unless all of them are on one machine.

    Collective: a broadcast and an all-gather of small objects. The file's name is gone when this returns.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    length = _BYTES * (size * _COLLECTIVES + 2 * size * size * _MESSAGES)
    path = [_make_file(length) if rank == 0 else None]
    try:
        dist.broadcast_object_list(path, group=group, group_src=0)
        memory = _map(path[0])
        marks: list[bytes | None] = [None] * size
        dist.all_gather_object(marks, memory and memory[length:], group=group)
    finally:
        if rank == 0 and path[0]:
            os.unlink(path[0])
    if None in marks or len(set(marks)) > 1:
        return None
    return Board(rank, size, memory)


def _make_file(length: int) -> str | None:
    """A file of zeros that takes no room until it is written to, and a mark behind them that no other file has."""
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
