"""Calls functions at given moments, from a thread that lives only while there are some to call."""

import heapq
import itertools
import threading
import time
from collections.abc import Callable

from scratch_ddp.link.sleep import sleep_until

_CLOSE = 2e-3  # seconds: up to here the thread can be told of an earlier moment, from here on it keeps to this one


class Alarm:
    """For whoever can't sleep: C++ that waits for a future."""

    def __init__(self) -> None:
        self._calls: list[tuple[float, int, Callable[[], None]]] = []  # a heap, by moment
        self._number = itertools.count()
        self._changed = threading.Condition()
        self._runs = False

    def at(self, moment: float, call: Callable[[], None]) -> None:
        """Have `call()` called at `moment`, in seconds of time.monotonic."""
        with self._changed:
            heapq.heappush(self._calls, (moment, next(self._number), call))
            self._changed.notify()
            if not self._runs:
                self._runs = True
                threading.Thread(target=self._run, name="rings-at-transfers-ends", daemon=True).start()

    def ring_now(self) -> None:
        """Call at once what has been asked for so far: nobody shall wait for it any more."""
        with self._changed:
            self._calls = [(0.0, number, call) for _, number, call in self._calls]
            heapq.heapify(self._calls)
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while self._calls and (left := self._calls[0][0] - time.monotonic()) > _CLOSE:
                    self._changed.wait(left - _CLOSE / 2)
                if not self._calls:
                    self._runs = False
                    return
                moment, _, call = heapq.heappop(self._calls)
            sleep_until(moment)
            call()
