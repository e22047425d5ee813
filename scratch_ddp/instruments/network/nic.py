"""One rank's end of the link, where transfers queue as they do at a network card."""

import bisect
import contextlib
import threading
from dataclasses import dataclass

from scratch_ddp.instruments.intervals import total_seconds

_SETTLED = 32  # settled sends, and settled receives, among which a delayed one is placed


@dataclass
class Transfer:
    """A collective or message on the wire.

    Times are in seconds of time.monotonic, which all processes of a machine share, as the link's clock shows them (up
    to 20 ms earlier on a busy machine, see `clock`). Until the transfer is waited for, `started` and `ended` are this
    rank's forecast: a peer may come later.
    """

    call: str  # "all_reduce", "send", …
    nbytes: int  # sent or received by this rank, whichever is more
    posted: float
    started: float
    ended: float


class Nic:
    """Carries one transfer at a time in each direction. A collective takes both directions, a message one."""

    def __init__(self) -> None:
        self.transfers: list[Transfer] = []  # in the order in which they were posted
        self._free = {"out": 0.0, "in": 0.0}
        # when the latest sends and receives had the wire, by time
        self._settled: dict[str, list[tuple[float, float]]] = {"send": [], "recv": []}
        self._lock = threading.Lock()

    def book(self, call: str, nbytes: int, posted: float, seconds: float) -> Transfer:
        """Queue a transfer that was called at `posted` and takes the wire for `seconds`."""
        with self._lock:
            directions = _directions(call)
            started = max(posted, *(self._free[direction] for direction in directions))
            transfer = Transfer(call, nbytes, posted, started, started + seconds)
            self._keep_taken(directions, transfer.ended)
            self.transfers.append(transfer)
        return transfer

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
            self._keep_taken(_directions(transfer.call), transfer.ended)

    def cancel(self, transfer: Transfer) -> None:
        """Remove a transfer that failed to start."""
        with self._lock:
            with contextlib.suppress(ValueError):  # users may have cleared the list
                self.transfers.remove(transfer)
            for direction in _directions(transfer.call):
                if self._free[direction] == transfer.ended:
                    self._free[direction] = transfer.started

    def clear_queue(self) -> None:
        """Free the wire now: transfers under way were abandoned."""
        with self._lock:
            self._free = dict.fromkeys(self._free, 0.0)
            for settled in self._settled.values():
                settled.clear()

    @property
    def busy_seconds(self) -> float:
        """Seconds for which the wire was taken, in either direction, by the transfers in the log."""
        with self._lock:
            return total_seconds((transfer.started, transfer.ended) for transfer in self.transfers)

    def _keep_taken(self, directions: tuple[str, ...], until: float) -> None:
        for direction in directions:
            self._free[direction] = max(self._free[direction], until)


def _directions(call: str) -> tuple[str, ...]:
    return {"send": ("out",), "recv": ("in",)}.get(call, ("out", "in"))
