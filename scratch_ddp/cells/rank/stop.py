"""Stop in a rank: where its main thread is, at which call it leaves, and how KeyboardInterrupt is raised there.

The kernel first has every rank hold before its next call that is for other ranks, and lets those that are behind go on
(`hold`), so that all leave the same step of a training loop. How they agree is told in `kernel/stop.py`.
"""

import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from scratch_ddp.cells.flight_recorder import IN_THIS_CELL
from scratch_ddp.cells.rank import interruptible_group
from scratch_ddp.cells.rank.interruptible_work import waiting_in

_TORCH = str(Path(torch.__file__).parent)
_NAME = KeyboardInterrupt.__name__
ANSWERS = "answers-an-editor"  # the name of threads that do
APART = (
    "the ranks were stopped at different places, so what they call now would not fit together: process groups work "
    "again in the next cell"
)
_NOWHERE: dict[str, Any] = {"line": None, "waits_in": None}


class Interrupts:
    """The interrupts of a rank's main thread. Other methods than those marked are called by its second thread.

    `files`: the names under which the learner's code was compiled. `send` takes a message for the kernel.
    """

    def __init__(self, files: Callable[[], Any], send: Callable[[dict[str, Any]], None]):
        self._files, self._send = files, send
        self._main_thread = threading.main_thread().ident
        # Free when the main thread should look again. An Event would not do: Python notices a signal in the middle of
        # one, whose own lock is then held for ever, and the second thread would wait for it.
        self._news = threading.Lock()
        self.interruptible = False  # whether the learner's code runs
        self.begin(None)
        signal.signal(signal.SIGINT, self.on_signal)
        interruptible_group.gates.append(self.before_call)

    def begin(self, cell: int | None) -> None:
        """A cell begins (main thread)."""
        self.cell = cell
        self.interrupted_in: dict[str, Any] | None = None  # where it was when it was interrupted last
        self._found = _NOWHERE  # where it was when an interrupt was asked for
        self._apart = False  # whether ranks were interrupted at different places
        self._asked = self._caught = 0  # the numbers of the last interrupt that was asked for, and that was raised
        self._until: dict[str, int] | None = None  # see `hold`
        self._held = False
        self._calls = self._collectives = 0  # in this cell
        self._last_call = self._longest_gap = 0.0  # seconds

    # Leaving together

    def hold(self, until: dict[str, int]) -> None:
        """Hold before the next call as soon as so many have begun, by the keys of `interruptible_group.place`."""
        self._until = until
        if self._news.locked():
            self._news.release()
        if not self._held:  # else the main thread says where it is
            self._send(self._place())

    def before_call(self, collective: bool) -> None:
        """A call for other ranks is about to begin."""
        if threading.current_thread().name == ANSWERS:
            raise RuntimeError("an editor has asked this rank alone")
        if threading.get_ident() != self._main_thread or not self.interruptible:
            return
        if self._caught and self._apart:
            raise RuntimeError(APART)
        if self._until is not None:
            self._hold_here()
        now = time.monotonic()
        if self._calls:
            self._longest_gap = max(self._longest_gap, now - self._last_call)
        self._calls, self._last_call = self._calls + 1, now
        self._collectives += collective

    def _hold_here(self) -> None:
        """Until a call that others have begun is still to be made, or until the interrupt (main thread)."""
        while Counter(self._until) <= Counter(self._place()["begun"]):
            self._held = True
            self._send(self._place())
            self._news.acquire()
        if self._held:
            self._held = False
            self._send(self._place())  # or the kernel would take it for held, and not ask whether this call waits

    def _place(self) -> dict[str, Any]:
        here = {"type": "place", "cell": self.cell, "held": self._held, "calls": self._calls, "gap": self._longest_gap}
        place = interruptible_group.place()
        return here | place | {"begun": place["begun"] | {IN_THIS_CELL: self._collectives}}

    # Interrupts

    def interrupt(self, number: int, together: bool, end: bool) -> None:
        """Raise KeyboardInterrupt in the cell, wherever the main thread is; once for each `number`.

        `together`: the ranks have agreed on this place, so what the learner's code calls next fits together. `end`: all
        ranks have been asked, so none takes the end of a connection for an error.
        """
        if number <= self._caught:
            return
        if number > self._asked:
            self._found = self.find_main_thread()
            self._asked, self._apart = number, not together or self._found["waits_in"] is not None
        signal.pthread_kill(self._main_thread, signal.SIGINT)  # noticed as soon as the main thread is back from C++
        if end and self._apart:
            interruptible_group.end_connections()

    def on_signal(self, *_: Any) -> None:
        """Called by Python in the main thread."""
        if self.interruptible and not (self._asked and self._caught == self._asked):
            self._caught, self._until, self._held = self._asked, None, False
            self.interrupted_in = self._found
            raise KeyboardInterrupt

    def end_of_learners_code(self, error: BaseException | None) -> bool:
        """No interrupts from here on: they would only hide what has happened (main thread).

        Returns whether the error is an interrupt's, which C++ may have turned into another exception.
        """
        self.interruptible = False
        is_interrupt = isinstance(error, KeyboardInterrupt) or _NAME in str(error)
        return is_interrupt and self.interrupted_in is not None

    def state(self, cell: int) -> dict[str, Any]:
        """Where the main thread is in a cell, and whether it was interrupted and is about to end."""
        here = self.find_main_thread() if self.cell == cell else _NOWHERE
        stopping = self.cell == cell and not self.interruptible
        return here | {"stopping": stopping, "asked": self._asked, "caught": self._caught}

    def find_main_thread(self) -> dict[str, Any]:
        """The line of the cell that the main thread is in, and the call that it waits in, if it does."""
        waits_in = waiting_in()
        line = called = None
        frame = innermost = sys._current_frames().get(self._main_thread)
        while frame is not None and line is None:
            file = frame.f_code.co_filename
            if file in self._files():
                line = frame.f_lineno
            elif file == dist.distributed_c10d.__file__:
                called = frame.f_code.co_name  # the outermost is what the learner called: all_gather_object
            frame = frame.f_back
        if waits_in is None and innermost.f_code.co_filename.startswith(_TORCH):
            waits_in = interruptible_group.awaited_in_native_code()
        if waits_in:
            waits_in = waits_in | {"called": called, "ranks": interruptible_group.ranks_of(waits_in)}
        return {"line": line, "waits_in": waits_in}
