"""One call of a function on this rank: bounded in time, its errors caught, what it did observed and counted."""

import contextlib
import functools
import linecache
import os
import signal
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from scratch_ddp.course.arena import Arena, Watch
from scratch_ddp.course.compare import copied, parts, times
from scratch_ddp.course.exercise import At, Exercise, Seen, Wrong
from scratch_ddp.instruments.memory.ledger import MemoryLedger
from scratch_ddp.instruments.traffic import Counted, traffic

_LOOK = 0.1  # seconds between two looks at whether a call has to end
NOT_WRITTEN = "not written yet"
HANGS = "hangs"  # by which a call has failed that had to be ended
_WIDTH = 240  # characters of a line or an error that are shown


@dataclass
class Ran:
    """How a call ended on a rank.

    failed: the criterion by which it has failed, "runs" unless a use or a group says another; "" if it
    returned. found: criterion -> the first complaint, "" if there is none. seen: what the use has yielded. digests: of
    the values seen. report: of its traffic.
    """

    failed: str = ""
    found: dict[str, str] = field(default_factory=dict)
    seen: list[Seen] = field(default_factory=list)
    digests: dict[str, str] = field(default_factory=dict)
    report: Counted | None = None

    def fail(self, criterion: str, words: str) -> None:
        self.failed, self.found = criterion, {criterion: words}


class TimeIsUp(BaseException):
    """Raised inside the learner's code. Not an Exception, so that `except Exception` does not catch it."""


class TimeLimit:
    """`with TimeLimit(arena, seconds) as limit:` around a check, and `with limit.of_call(failed):` around each call.

    A call is ended when its time is over, or, after a second, when `failed` is set in the store. A thread sends a
    signal, again and again: the main thread notices it while it computes in Python. A wait in gloo notices nothing; so
    the arena's connections are ended, when all ranks know that the time is over.
    """

    def __init__(self, arena: Arena, seconds: float):
        self.seconds, self._arena, self._main = seconds, arena, threading.get_ident()
        self._call: SimpleNamespace | None = None  # the one that runs
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="time limit", daemon=True)

    def __enter__(self) -> "TimeLimit":
        self._before = signal.signal(signal.SIGALRM, self._on_signal)
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._left.set()
        self._thread.join()  # after that it sends nothing more
        signal.signal(signal.SIGALRM, self._before)

    @contextlib.contextmanager
    def of_call(self, failed: str) -> Iterator[SimpleNamespace]:
        """`over` of what it yields says whether the call had to end."""
        now = time.monotonic()
        # On a busy machine a rank comes later than the others to the same line, and shall still come to it.
        alone_until = now + min(1.0, self.seconds / 2)
        self._call = SimpleNamespace(failed=failed, alone_until=alone_until, deadline=now + self.seconds, over=False)
        try:
            yield self._call
        finally:
            self._call = None

    def _on_signal(self, *_: Any) -> None:
        if self._call and self._call.over:
            raise TimeIsUp

    def _watch(self) -> None:
        while not self._left.wait(_LOOK):
            call, now = self._call, time.monotonic()
            failed_elsewhere = call and now > call.alone_until and self._arena.store.check([call.failed])
            if call and not call.over and (failed_elsewhere or now > call.deadline):
                call.over, call.deadline = True, now + 3 * _LOOK
            if call and call.over:
                signal.pthread_kill(self._main, signal.SIGALRM)
                if now > call.deadline:
                    self._arena.end_connections()


def run(function: Callable, exercise: Exercise, args: tuple, arena: Arena, place: str, limit: TimeLimit, at: At) -> Ran:
    """Use the function on these arguments. Whatever it raises is caught, except for Stop (KeyboardInterrupt).

    It ends at the limit, and sooner where another rank has failed. `place` is a name for this call.
    """
    ran, answer = Ran(), functools.partial(function, group=at.group) if at.group else function
    in_a_room = exercise.room and function is not exercise.reference
    if in_a_room:
        first = next(arg for arg in args if isinstance(arg, torch.Tensor))
        ledger = MemoryLedger(SimpleNamespace(given=args), first.dtype)
        with ledger("before"):
            pass
        answer = ledger("call")(answer)
    failed_here = f"{arena.name}/{place}/failed"  # set in the store: the others need not wait for this rank any longer
    with Watch(arena, place, at.group), traffic() as counted:
        try:
            with limit.of_call(failed_here) as call:
                for criterion, what, value in exercise.use(answer, *args):
                    for name, part in parts(value).items():
                        ran.seen.append((criterion, f"{what}: {name}" if name else what, copied(part)))
        except Wrong as wrong:
            ran.fail(wrong.criterion, wrong.words)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit as well: an answer must not end the rank
            line = _place(error, function)
            if isinstance(error, TimeIsUp) or (call.over and isinstance(error, RuntimeError)):
                ran.fail(HANGS, f"did not come back: after {limit.seconds:g} s still {line or 'running'}")
            elif isinstance(error, NotImplementedError) and not str(error):
                ran.fail("written", NOT_WRITTEN)
            else:
                ran.fail("runs", f"raised {in_short(error)}{f' ({line})' if line else ''}")
    if call.over and not ran.failed:  # the answer has caught what should have ended it
        ran.fail(HANGS, f"did not come back within {limit.seconds:g} s")
    if ran.failed not in ("", HANGS):
        arena.store.set(failed_here, "")
    ran.report, begun = counted, started_and_waited_for(counted)
    late = begun["started"] - begun["waited for"]
    if late and not ran.failed:
        ran.fail("waits", f"{' or '.join(counted.calls)} was started and never waited for, {times(late)}")
    elif in_a_room and not ran.failed:
        held, room = ledger.peak() - ledger.moments[0].elements(), exercise.room(at, *args)
        words = f"holds {held:,} elements beside its arguments, budget {room:,}"
        words += " (a name keeps its tensor until it is given another)"
        ran.found["memory"] = words if held > room else ""
    return ran


def started_and_waited_for(counted: Counted) -> dict[str, int]:
    """How many calls a rank has started, and of how many it took the end: {"started": n, "waited for": m}."""
    events = Counter(event for event, _ in counted.events)
    return {"started": events["start"], "waited for": events["wait"]}


def in_short(error: BaseException) -> str:
    """The kind of an error and its first line."""
    first = (str(error).strip().splitlines() or [""])[0].rstrip(".")
    if first == "'NoneType' object has no attribute 'wait'":
        first += ": without async_op=True a collective returns no handle"
    return f"{type(error).__name__}: {first[:_WIDTH]}" if first else type(error).__name__


def _place(error: BaseException, function: Callable) -> str:
    """The innermost line of the learner's own code: in the function's file, or in another cell (no file on disk)."""
    own = getattr(getattr(function, "__code__", None), "co_filename", None)
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        file = frame.f_code.co_filename
        text = linecache.getline(file, line or 0).strip()
        if file == own or (text and not os.path.exists(file)):
            return f"in line {line}, `{text[:_WIDTH]}`"
    return ""
