"""One rank's end of the link: transfers queue for it as they do for a network card."""

import contextlib
import threading
from dataclasses import dataclass

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
