"""One rank's end of the link, where transfers queue as at a network card; and what the ranks tell each other about it.

A collective begins when its last rank is ready, which no rank can tell from the data that it receives. But the ranks of
one machine share a clock. Before it calls the process group, each rank writes into a shared file when its own wire is
free for its k-th transfer. Once that call has ended, it reads the times of the others.
"""

import bisect
import mmap
import os
import tempfile
import threading
from collections import Counter
from dataclasses import dataclass

import torch.distributed as dist

from scratch_ddp.common.agreement import together
from scratch_ddp.instruments.traffic.calls import Call

_SETTLED = 32  # settled sends, and settled receives, among which a delayed one is placed
_KEPT = 2**13  # times kept in a row: far more than can be under way


@dataclass
class Transfer:
    """A collective or message on the wire, in seconds of time.monotonic as the link's clock shows them (see `clock`).

    Until the transfer is waited for, `started` and `ended` are this rank's forecast: a peer may come later.
    """

    call: str  # "all_reduce", "send", …
    nbytes: int  # sent or received by this rank, whichever is more
    posted: float
    started: float
    ended: float
    number: int | None = None  # among those of its ranks


class Nic:
    """Carries one transfer at a time in each direction; a collective takes both. `ready_times`: None without peers."""

    def __init__(self, ready_times: "ReadyTimes | None"):
        self.transfers: list[Transfer] = []  # in the order in which they were posted
        self.ready_times = ready_times
        self._lock = threading.Lock()
        self.over = threading.Event()  # set, and another one from then on, when a Stop ends what is under way
        self.give_up()

    def give_up(self) -> None:
        """Free the wire now: what is on it never arrives, and nobody waits for it any longer."""
        self.over.set()
        self.over = threading.Event()
        self._free = {"out": 0.0, "in": 0.0}
        # when the latest sends and receives had the wire, by time
        self._settled: dict[str, list[tuple[float, float]]] = {"send": [], "recv": []}

    def book(self, call: Call, nbytes: int, posted: float, seconds: float) -> Transfer:
        """Queue a transfer that was called at `posted` and takes the wire for `seconds`, and tell the peers when."""
        with self._lock:
            started = max(posted, *(self._free[direction] for direction in _directions(call.name)))
            transfer = Transfer(call.name, nbytes, posted, started, started + seconds)
            self._keep_taken(transfer)
            self.transfers.append(transfer)
        if self.ready_times is not None and (call.peer is not None or call.name != "recv"):
            transfer.number = self.ready_times.write(call, started)
        return transfer

    def settle(self, call: Call, transfer: Transfer) -> None:
        """Find out when a transfer began: its data has arrived, so all ranks that matter have written their times."""
        if self.ready_times is None:
            return
        if transfer.number is None:  # a receive, whose source is known by now
            transfer.number = self.ready_times.write(call, transfer.started)
        ready = self.ready_times.latest(call, transfer.number)
        with self._lock:
            started, seconds = max(transfer.started, ready), transfer.ended - transfer.started
            if transfer.call in self._settled:  # delayed messages still have the wire one at a time
                settled = self._settled[transfer.call]
                for taken_from, taken_until in settled:
                    if started < taken_until and started + seconds > taken_from:
                        started = taken_until
                bisect.insort(settled, (started, started + seconds))
                del settled[:-_SETTLED]
            transfer.started, transfer.ended = started, started + seconds
            self._keep_taken(transfer)

    def _keep_taken(self, transfer: Transfer) -> None:
        for direction in _directions(transfer.call):
            self._free[direction] = max(self._free[direction], transfer.ended)


def _directions(call: str) -> tuple[str, ...]:
    return {"send": ("out",), "recv": ("in",)}.get(call, ("out", "in"))


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
    """`count` float64 zeros that all ranks share. Collective. Raises ValueError unless all are on one machine."""
    path: list[str | None] = [None]
    if dist.get_rank(group) == 0:
        handle, path[0] = tempfile.mkstemp(prefix="scratch_ddp-link-")
        os.truncate(handle, 8 * count)  # zeros that take no room
        os.close(handle)
    try:
        dist.broadcast_object_list(path, group=group, group_src=0)
        with together(group, what="a simulated link connects ranks of one machine"), open(path[0], "r+b") as file:
            return memoryview(mmap.mmap(file.fileno(), 0)).cast("d")
    finally:
        if dist.get_rank(group) == 0:
            os.unlink(path[0])
