"""An operation on a link: it ends when the group below is done and the transfer's time on the wire has passed."""

import datetime
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork

from scratch_ddp.instruments.network.clock import now, sleep_until
from scratch_ddp.instruments.network.nic import Transfer

_CLOSE = 2e-3  # seconds before a call: from then on its thread no longer listens for an earlier one


class Alarm:
    """Calls functions at given times, for C++ code that waits for a future. Each has a thread until it is called."""

    def __init__(self) -> None:
        self._over = threading.Event()

    def at(self, moment: float, call: Callable[[], None]) -> None:
        """Have `call()` called at `moment`, in seconds of time.monotonic."""
        over = self._over

        def ring() -> None:
            if not over.wait(max(0.0, moment - time.monotonic() - _CLOSE)):
                sleep_until(moment)
            call()

        threading.Thread(target=ring, name="transfer-alarm", daemon=True).start()

    def ring_now(self) -> None:
        """Make all calls at once, so that nobody waits for them any longer."""
        self._over.set()
        self._over = threading.Event()


class LinkedWork(dist.Work):
    """The work of one transfer. `wait` sleeps; a thread is needed only for a future, as torch's DDP asks for one.

    `below`: the work of the group below; `outputs`: its tensors, the future's value; `settle`: called once that has
    ended, to learn from the peers when the transfer really began; `give_up`: called if an exception such as an
    interrupt ends the sleep.
    """

    def __init__(
        self,
        below: dist.Work,
        outputs: Any,
        transfer: Transfer,
        settle: Callable[[dist.Work], None],
        give_up: Callable[[], None],
        alarm: Alarm,
    ):
        super().__init__()
        self._below, self._outputs, self._transfer = below, outputs, transfer
        self._settle, self._give_up, self._alarm = settle, give_up, alarm
        self._lock = threading.Lock()
        self._future: torch.futures.Future | None = None

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Return when the transfer has ended. Raises what the group below raises, or RuntimeError after `timeout`."""
        __tracebackhide__ = True  # in a rank cell learners see their own line, not this one
        if not timeout:  # torch passes 0 for "no limit of its own"
            self._below.wait()
            self._sleep_until(self._end())
            return True
        limit = now() + timeout.total_seconds()
        self._below.wait(timeout)
        self._sleep_until(min(self._end(), limit))
        if self._end() > limit:
            raise RuntimeError(f"{self._transfer.call}: not finished after {timeout.total_seconds():g} s")
        return True

    def _sleep_until(self, moment: float) -> None:
        __tracebackhide__ = True
        try:
            sleep_until(moment)
        except BaseException:
            self._give_up()
            raise

    def is_completed(self) -> bool:
        below_is = isinstance(self._below, FakeWork) or self._below.is_completed()  # a fake work never says that it is
        return below_is and now() >= self._end()

    def _source_rank(self) -> int:
        return self._below._source_rank()

    def get_future(self) -> torch.futures.Future:
        """A future that is done when the transfer has ended."""
        with self._lock:
            if self._future is not None:
                return self._future
            self._future = torch.futures.Future()
        self._below.get_future().add_done_callback(self._below_done)
        return self._future

    def _below_done(self, below: torch.futures.Future) -> None:
        try:
            below.wait()
        except Exception as error:
            self._finish(error)
        else:
            self._alarm.at(self._end(), self._finish)

    def _finish(self, error: Exception | None = None) -> None:
        try:
            if error is not None:
                self._future.set_exception(error)
            else:
                self._below.wait()  # it has ended; on a GPU the stream then waits for the copy back from main memory
                self._future.set_result(self._outputs)
        except RuntimeError:
            if not self._future.done():  # otherwise Stop has ended the wait meanwhile
                raise

    def _end(self) -> float:
        """When the transfer ends. Called only once the group below is done."""
        with self._lock:
            if self._settle is not None:
                self._settle(self._below)
                self._settle = None
        return self._transfer.ended
