"""An operation on a link: through when the group below is, and its transfer's time on the wire has passed."""

import datetime
import heapq
import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from scratch_ddp.instruments.network.clock import now, sleep_until
from scratch_ddp.instruments.network.nic import Transfer

# FOLDED: Calls functions at given moments, from a thread that lives only while there are some to call.

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


class LinkedWork(dist.Work):
    """`wait` sleeps; a thread takes part only where somebody asks for a future, as torch's DDP does.

    `below`: the work of the group below; `settle`: called once that is through, learns from the peers when the
    transfer really began; `give_up`: called where an exception ends the sleep, as an interrupt does; `free`: told of
    the future, by whoever can end waits that hang in C++.
    """

    def __init__(
        self,
        below: dist.Work,
        transfer: Transfer,
        settle: Callable[[dist.Work], None],
        give_up: Callable[[], None],
        alarm: Alarm,
        free: Callable[[torch.futures.Future], None] | None,
    ):
        super().__init__()
        self._below, self._transfer, self._settle, self._give_up = below, transfer, settle, give_up
        self._alarm, self._free = alarm, free
        self._lock = threading.Lock()
        self._future: torch.futures.Future | None = None

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Return when the transfer is through. Raises what the group below raises, or RuntimeError after `timeout`."""
        __tracebackhide__ = True  # in a rank cell learners see their own line, not this one
        if not timeout:  # torch passes 0 for "no limit of its own"
            self._below.wait()
            self._sleep_until(self._end())
            return True
        limit = now() + timeout.total_seconds()
        self._below.wait(timeout)
        self._sleep_until(min(self._end(), limit))
        if self._end() > limit:
            raise RuntimeError(f"{self._transfer.call}: not through after {timeout.total_seconds():g} s")
        return True

    def _sleep_until(self, moment: float) -> None:
        __tracebackhide__ = True
        try:
            sleep_until(moment)
        except BaseException:
            self._give_up()
            raise

    def is_completed(self) -> bool:
        return self._below.is_completed() and now() >= self._end()

    def is_success(self) -> bool:
        return self.is_completed() and self._below.is_success()

    def exception(self) -> Any:
        return self._below.exception()

    def result(self) -> list[torch.Tensor]:
        return self._below.result()

    def _source_rank(self) -> int:
        return self._below._source_rank()

    def get_future(self) -> torch.futures.Future:
        """A future that comes when the transfer is through, with the value of the one below."""
        with self._lock:
            if self._future is not None:
                return self._future
            self._future = torch.futures.Future()
        if self._free is not None:
            self._free(self._future)
        self._below.get_future().add_done_callback(self._through_below)
        return self._future

    def _through_below(self, below: torch.futures.Future) -> None:
        try:
            value = below.value()
        except Exception as error:
            self._come(error=error)
        else:
            self._alarm.at(self._end(), lambda: self._come(value))

    def _come(self, value: Any = None, error: Exception | None = None) -> None:
        try:
            if error is not None:
                self._future.set_exception(error)
            else:
                self._below.wait()  # it is through; on a GPU, lets the stream wait for the copy back from main memory
                self._future.set_result(value)
        except RuntimeError:
            if not self._future.done():  # else somebody has ended the wait in the meantime
                raise

    def _end(self) -> float:
        """When the transfer's time on the wire has passed. Only asked once the group below is through."""
        with self._lock:
            if self._settle is not None:
                self._settle(self._below)
                self._settle = None
        return self._transfer.ended
