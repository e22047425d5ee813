"""One call of a function on this rank: bounded in time, its errors caught, what it did observed and counted."""

import functools
import linecache
import os
import signal
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace, TracebackType
from typing import Any

import torch

from scratch_ddp.course.arena import Arena, At, Watch
from scratch_ddp.course.compare import copied, parts, times
from scratch_ddp.course.exercise import Exercise, Seen, Wrong
from scratch_ddp.instruments.memory.ledger import MemoryLedger
from scratch_ddp.instruments.traffic import Counted, traffic

_LOOK = 0.2  # seconds between two looks at whether a call has to end
_WIDTH = 240  # characters of a line or an error that are shown


@dataclass
class Ran:
    """How a call ended on a rank: `how` is "returned", "raised", "wrong", "waits", or "unwritten" for a stub.

    words, criterion: for a complaint, unless it returned. seen: what the use has yielded. report: of its traffic. late:
    what it has not waited for, in words. begun: as in Watch. found: criterion -> the first complaint about what was
    seen, "" if there is none. digests: of the values seen.
    """

    how: str = "returned"
    words: str = "had returned"
    criterion: str = "runs"
    seen: list[Seen] = field(default_factory=list)
    report: Counted | None = None
    late: str = ""
    begun: dict[str, tuple[list[int], int]] = field(default_factory=dict)
    found: dict[str, str] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)


class TimeIsUp(BaseException):
    """Raised inside the learner's code. Not an Exception, so that `except Exception` does not catch it."""


def run(function: Callable, exercise: Exercise, args: tuple, arena: Arena, place: str, seconds: float, at: At) -> Ran:
    """Use the function on these arguments. Whatever it raises is caught, except for Stop (KeyboardInterrupt).

    It may take `seconds`, and ends sooner where another rank has failed. `place` is a name for this call.
    """
    ran, answer = Ran(), functools.partial(function, group=at.group) if at.group else function
    if exercise.room:
        first = next(arg for arg in args if isinstance(arg, torch.Tensor))
        ledger = MemoryLedger(SimpleNamespace(given=args), first.dtype)
        with ledger("before"):
            pass
        answer = ledger("call")(answer)
    limit = TimeLimit(seconds, arena, place)
    with Watch(arena, place, at.group) as calls, traffic() as counted:
        try:
            with limit:
                for criterion, what, value in exercise.use(answer, *args):
                    for name, part in parts(value).items():
                        ran.seen.append((criterion, f"{what}: {name}" if name else what, copied(part)))
        except Wrong as wrong:
            ran.how, ran.criterion, ran.words = "wrong", wrong.criterion, wrong.words
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit as well: an answer must not end the rank
            line = _place(error.__traceback__, function)
            ran.how, ran.words = "raised", f"raised {in_short(error)}{f' ({line})' if line else ''}"
            if limit.has_ended(error):
                ran.how, ran.words = "waits", f"did not come back: after {seconds:g} s still {line or 'running'}"
            elif isinstance(error, NotImplementedError) and not str(error):
                ran.how = "unwritten"
    if calls.stray:
        ran.how, ran.criterion = "wrong", "group"
        ran.words = f"{calls.stray} goes through all ranks, should stay in `group`"
    if ran.how not in ("returned", "waits"):
        arena.fail(place)
    ran.report, ran.begun, begun = counted, calls.begun, started_and_waited_for(counted)
    if late := begun["started"] - begun["waited for"]:
        ran.late = f"{' or '.join(ran.report.calls)} was started and never waited for, {times(late)}"
    if exercise.room:
        held, room = ledger.peak() - ledger.moments[0].elements(), exercise.room(*args)
        words = f"holds {held:,} elements beside its arguments, budget {room:,}"
        ran.found["memory"] = words if held > room else ""
    return ran


def started_and_waited_for(counted: Counted) -> dict[str, int]:
    """How many calls a rank has started, and of how many it took the end: {"started": n, "waited for": m}."""
    events = Counter(event for event, _ in counted.events)
    return {"started": events["start"], "waited for": events["wait"]}


class TimeLimit:
    """Ends the block when the time is over or when another rank's call at `place` has failed.

    A thread sends a signal, again and again: the main thread notices it while it computes in Python. A wait in gloo
    notices nothing; so the arena's connections are ended, when all ranks know that the time is over.
    """

    def __init__(self, seconds: float, arena: Arena, place: str):
        self._seconds, self._arena, self._place = seconds, arena, place
        self._left, self._over = threading.Event(), False
        self._main = threading.get_ident()

    def has_ended(self, error: BaseException) -> bool:
        """Whether the error is that of the limit: its own, or that of a wait whose connection was ended."""
        return isinstance(error, TimeIsUp) or (self._over and isinstance(error, RuntimeError))

    def __enter__(self) -> "TimeLimit":
        self._before = signal.signal(signal.SIGALRM, self._on_signal)
        self._thread = threading.Thread(target=self._watch, name="time limit", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._left.set()
        self._thread.join()  # after that it sends nothing more
        signal.signal(signal.SIGALRM, self._before)

    def _on_signal(self, *_: Any) -> None:
        if not self._left.is_set():
            raise TimeIsUp

    def _watch(self) -> None:
        deadline = time.monotonic() + self._seconds
        while not self._left.wait(min(_LOOK, self._seconds)):
            if not self._over and (time.monotonic() > deadline or self._arena.failed(self._place)):
                self._over, deadline = True, time.monotonic()
            if self._over:
                signal.pthread_kill(self._main, signal.SIGALRM)
                if time.monotonic() > deadline + 2 * _LOOK:
                    self._arena.end_connections()


def in_short(error: BaseException) -> str:
    """The kind of an error and its first line."""
    first = (str(error).strip().splitlines() or [""])[0].rstrip(".")
    return f"{type(error).__name__}: {first[:_WIDTH]}" if first else type(error).__name__


def _place(where: TracebackType | None, function: Callable) -> str:
    """The innermost line of the learner's own code: in the function's file, or in another cell (no file on disk)."""
    own = getattr(getattr(function, "__code__", None), "co_filename", None)
    for frame, line in reversed(list(traceback.walk_tb(where))):
        file = frame.f_code.co_filename
        text = linecache.getline(file, line or 0).strip()
        if file == own or (text and not os.path.exists(file)):
            return f"in line {line}, `{text[:_WIDTH]}`"
    return ""
