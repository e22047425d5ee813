"""An operation on a link: it ends when the group below is done and the transfer's time on the wire has passed."""

import contextlib
import datetime
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork

from scratch_ddp.instruments.network.clock import now, sleep_until
from scratch_ddp.instruments.network.nic import Nic, Transfer
from scratch_ddp.instruments.traffic.calls import Call

_CLOSE = 2e-3  # seconds before a transfer's end: from then on its thread no longer listens for an earlier one


class LinkedWork(dist.Work):
    """The work of one transfer over that of the group `below`. A thread is needed for a future alone, as of DDP."""

    def __init__(self, nic: Nic, below: dist.Work, outputs: Any, call: Call, transfer: Transfer):
        super().__init__()
        self._nic, self._below, self._outputs, self._call, self._transfer = nic, below, outputs, call, transfer
        self._lock, self._settled = threading.Lock(), False
        self._future: torch.futures.Future | None = None

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Return when the transfer has ended. Raises what the group below raises, also after `timeout`."""
        __tracebackhide__ = True  # in a rank cell learners see their own line, not this one
        self._below.wait(timeout) if timeout else self._below.wait()  # torch passes 0 for "no limit of its own"
        try:
            sleep_until(self._end())
        except BaseException:  # such as an interrupt: the wire is free again
            self._nic.give_up()
            raise
        return True

    def is_completed(self) -> bool:
        below_is = isinstance(self._below, FakeWork) or self._below.is_completed()  # a fake work never says that it is
        return below_is and now() >= self._end()

    def _source_rank(self) -> int:
        return self._below._source_rank()

    def get_future(self) -> torch.futures.Future:
        """A future that is done when the transfer has ended."""
        with self._lock:
            if self._future is None:
                self._future, over = torch.futures.Future(), (self._nic.over,)
                threading.Thread(target=self._finish, args=over, name="transfer-alarm", daemon=True).start()
            return self._future

    def _finish(self, over: threading.Event) -> None:
        error = None
        try:
            self._below.wait()
            if not over.wait(max(0.0, self._end() - time.monotonic() - _CLOSE)):
                sleep_until(self._end())
            self._below.wait()  # it has ended; on a GPU the stream then waits for the copy back from main memory
        except Exception as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # Stop may have ended the wait meanwhile
            self._future.set_exception(error) if error else self._future.set_result(self._outputs)

    def _end(self) -> float:
        """When the transfer ends. Called only once the group below is done."""
        with self._lock:
            if not self._settled:
                if self._call.name == "recv" and self._call.peer is None:
                    self._call.peer = self._below._source_rank()
                self._nic.settle(self._call, self._transfer)
                self._settled = True
        return self._transfer.ended
