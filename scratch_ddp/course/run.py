"""One call of a function on this rank: bounded in time, its errors caught, what it did observed and counted."""

import contextlib
import functools
import itertools
import linecache
import os
import signal
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace, TracebackType
from typing import Any

import torch

from scratch_ddp.course.arena import Arena, At
from scratch_ddp.course.compare import copied, times
from scratch_ddp.course.exercise import Exercise, Seen, Wrong
from scratch_ddp.instruments.memory.ledger import MemoryLedger
from scratch_ddp.instruments.traffic import Counts, traffic
from scratch_ddp.instruments.traffic.counts import Report
from scratch_ddp.instruments.traffic.rounds import Start, Wait

_LOOK = 0.2  # seconds between two looks at whether a call has to end
_WIDTH = 240  # characters of a line or an error that are shown


@dataclass
class Ran:
    """How a call ended on a rank. `how`: "returned", "raised", "wrong" or "waits"; `words` and `place` say more.

    criterion: the one that fails with `words`, where it is wrong. seen: what the use has yielded. report: of its
    traffic. largest: bytes of its largest message. held: the most elements it held beside its arguments, if asked.
    """

    how: str = "returned"
    words: str = ""
    place: str = ""
    criterion: str = "runs"
    seen: list[Seen] = field(default_factory=list)
    report: Report | None = None
    largest: int = 0
    held: int = 0


class TimeIsUp(BaseException):
    """Raised inside the learner's code. Not an Exception, so that `except Exception` does not catch it."""


def run(function: Callable, exercise: Exercise, args: tuple, arena: Arena, place: str, seconds: float, at: At) -> Ran:
    """Use the function on these arguments. Whatever it raises is caught, except for Stop (KeyboardInterrupt).

    It may take `seconds`, and ends sooner where another rank has failed. `place` is a name for this call.
    """
    ran, ledger = Ran(), MemoryLedger(SimpleNamespace(given=args), _dtype(args))
    answer = functools.partial(function, group=at.group) if at.group else function
    if exercise.room:
        answer = _observed(answer, ledger)
    with arena.watched(place, at.group) as calls, traffic() as counted:
        try:
            with _time_limit(seconds, lambda: arena.failed(place)):
                for criterion, what, value in exercise.use(answer, *args):
                    ran.seen.append((criterion, what, copied(value)))
        except TimeIsUp as stop:
            ran.how, ran.place = "waits", _place(stop.__traceback__, function)
        except Wrong as wrong:
            ran.how, ran.criterion, ran.words = "wrong", wrong.criterion, wrong.words
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit as well: an answer must not end the rank
            ran.how, ran.words, ran.place = "raised", in_short(error), _place(error.__traceback__, function)
    if calls.stray:
        ran.how, ran.criterion = "wrong", "group"
        ran.words = f"{calls.stray} goes through all ranks, should stay in `group`"
    if ran.how in ("raised", "wrong"):
        arena.fail(place)
    ran.report, ran.largest = counted.report(), calls.largest
    ran.held = ledger.peak() - ledger.moments[0].elements() if ledger.moments else 0
    return ran


def _observed(answer: Callable, ledger: MemoryLedger) -> Callable:
    """The answer, with what it holds seen by the ledger, whose first moment is what was there before."""
    with ledger("before"):
        pass

    @functools.wraps(answer)
    def observed(*args: Any, **kwargs: Any) -> Any:
        with ledger("call"):
            return answer(*args, **kwargs)

    return observed


@contextlib.contextmanager
def _time_limit(seconds: float, others_failed: Callable[[], bool]) -> Iterator[None]:
    """Raise TimeIsUp in the block when the time is over or when others have failed: then again and again.

    It is a signal. So it works in the main thread only, and while the code computes or waits in Python: in the arena,
    but not inside native code.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    deadline = time.monotonic() + seconds

    def look(*_: Any) -> None:
        if time.monotonic() > deadline or others_failed():
            raise TimeIsUp

    before = signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, min(_LOOK, seconds), _LOOK)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _dtype(args: tuple) -> torch.dtype:
    return next((arg.dtype for arg in args if isinstance(arg, torch.Tensor)), torch.float32)


def in_short(error: BaseException) -> str:
    first = (str(error).strip().splitlines() or [""])[0].rstrip(".")
    return f"{type(error).__name__}: {first[:_WIDTH]}" if first else type(error).__name__


def _place(where: TracebackType | None, function: Callable) -> str:
    """The innermost line of the learner's own code: in the function's file, or in another cell (no file on disk)."""
    own = getattr(getattr(function, "__code__", None), "co_filename", None)
    for frame, line in reversed(list(traceback.walk_tb(where))):
        file = frame.f_code.co_filename
        if line and (file == own or (linecache.getline(file, line) and not os.path.exists(file))):
            return f"line {line}, `{linecache.getline(file, line).strip()[:_WIDTH]}`"
    return ""


def never_waited_for(report: Report) -> str:
    """Calls of which nobody took the end, as a complaint; "" if there are none."""
    counts, events = report
    waited = {event.number for event in events if isinstance(event, Wait)}
    names = [_name(event, counts) for event in events if isinstance(event, Start) and event.number not in waited]
    return " and ".join(f"{name} was started and never waited for, {times(n)}" for name, n in Counter(names).items())


def _name(event: Start, counts: Counts) -> str:
    if event.channel[0] == "message":
        return "a message"
    names = counts.calls.keys() - {"send", "recv"}
    return names.pop() if len(names) == 1 else "a collective"


def left_over(reports: dict[int, Report]) -> str:
    """What is still in the process group after a call, in a sentence; "" if nothing is. reports: by rank."""
    begun = {
        rank: Counter(event.channel for event in events if isinstance(event, Start))
        for rank, (_, events) in reports.items()
    }
    for source, target in itertools.permutations(begun, 2):
        sent, received = (_messages(begun[end], source, target) for end in (source, target))
        if sent > received:
            arrived = times(received) if received else "nothing"
            return f"Rank {source} sent to rank {target} {times(sent)}, rank {target} received {arrived}."
        if sent < received:
            return f"Rank {target} waits for a message that rank {source} never sent."
    for rank, other in itertools.permutations(begun, 2):
        for channel, number in begun[rank].items():
            theirs = begun[other][channel]
            if channel[0] == "collective" and other in channel[1] and number > theirs:
                return f"Rank {rank} called {_collectives(number)}, rank {other} {theirs}."
    return ""


def _collectives(number: int) -> str:
    return f"{number} collective{'s' if number > 1 else ''}"


def _messages(begun: Counter, source: int, target: int) -> int:
    return sum(number for channel, number in begun.items() if channel[:3] == ("message", source, target))
