"""One rank's end of the link, where transfers queue as they do at a network card."""

import bisect
import threading
from dataclasses import dataclass

from scratch_ddp.instruments.network.ready_times import ReadyTimes
from scratch_ddp.instruments.traffic.calls import Call

_SETTLED = 32  # settled sends, and settled receives, among which a delayed one is placed


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
    """Carries one transfer at a time in each direction. A collective takes both directions, a message one.

    `ready_times`: where ranks tell each other when their wires are free; None without peers.
    """

    def __init__(self, ready_times: ReadyTimes | None):
        self.transfers: list[Transfer] = []  # in the order in which they were posted
        self._ready_times = ready_times
        self._lock = threading.Lock()
        self.over = threading.Event()  # set, and another one from then on, when a Stop ends what is under way
        self.clear_queue()

    def give_up(self) -> None:
        """What is on the wire never arrives, and nobody waits for it any longer."""
        self.clear_queue()
        self.over.set()
        self.over = threading.Event()

    def clear_queue(self) -> None:
        """Free the wire now: transfers under way were abandoned."""
        self._free = {"out": 0.0, "in": 0.0}
        # when the latest sends and receives had the wire, by time
        self._settled: dict[str, list[tuple[float, float]]] = {"send": [], "recv": []}

    def count_from_0(self) -> None:
        """Number calls from 0 again. Every rank does so at the same point."""
        if self._ready_times is not None:
            self._ready_times.reset()

    def book(self, call: Call, nbytes: int, posted: float, seconds: float) -> Transfer:
        """Queue a transfer that was called at `posted` and takes the wire for `seconds`, and tell the peers when."""
        with self._lock:
            started = max(posted, *(self._free[direction] for direction in _directions(call.name)))
            transfer = Transfer(call.name, nbytes, posted, started, started + seconds)
            self._keep_taken(transfer)
            self.transfers.append(transfer)
        if self._ready_times is not None and (call.peer is not None or call.name != "recv"):
            transfer.number = self._ready_times.write(call, started)
        return transfer

    def settle(self, call: Call, transfer: Transfer) -> None:
        """Find out when a transfer began: its data has arrived, so all ranks that matter have written their times."""
        if self._ready_times is not None:
            if transfer.number is None:  # a receive, whose source is known by now
                transfer.number = self._ready_times.write(call, transfer.started)
            self.delay(transfer, self._ready_times.latest(call, transfer.number))

    def delay(self, transfer: Transfer, ready: float) -> None:
        """Start a transfer no earlier than `ready`, the time at which the last of its ranks was ready."""
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
