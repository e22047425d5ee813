"""One call of a learner's function on this rank: bounded in time, its output caught, its errors and messages noted.

A message that nobody received, or a collective that some rank left out, stays in the process group, and the next cell
takes it for its own. So each rank logs what it sends and receives, and `left_over` compares the logs of all ranks.
"""

import contextlib
import io
import linecache
import os
import signal
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from types import FrameType, TracebackType
from typing import Any

import torch.distributed as dist

from scratch_ddp.course.wording import ranks, times
from scratch_ddp.instruments.traffic.calls import Call
from scratch_ddp.instruments.traffic.intercept import works_under_way

SHOWN_LINES, SHOWN_WIDTH = 5, 160  # of what an answer prints


@dataclass
class Outcome:
    """How a call ended on one rank. `how`: "returned", "raised" or "unfinished"; `line` and `code` say where."""

    how: str
    error: str = ""
    line: int | None = None
    code: str = ""
    printed: list[str] | None = None
    lines_printed: int = 0
    line_ended: bool = True  # what it printed ends with a line break
    left_changed: str = ""  # as a complaint: what it has put in place of sys.stdout or sys.stderr

    def as_fact(self) -> dict[str, Any]:
        return asdict(self)


class TimeIsUp(BaseException):
    """Raised inside the learner's code. Not an Exception, so that `except Exception` does not catch it.

    elsewhere: where another thread is that this one waits for, as `_place` takes it.
    """

    elsewhere: Sequence[tuple[str, int | None]] = ()


def attempt(function: Callable, args: tuple, seconds: float) -> tuple[Any, Outcome]:
    """Call the function; return its result or None, and how it ended. KeyboardInterrupt passes through.

    The limit is a signal. So it works in the main thread only, and only while the code computes or waits in Python: in
    a rank cell's own process group, but not inside gloo or NCCL.
    """
    printed, trace = _FirstLines(), sys.gettrace()
    result, outcome, replaced = None, Outcome("returned"), []
    try:
        with _time_limit(seconds) as limit:
            try:
                with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed), _group_protected():
                    limit.running = True
                    try:
                        result = function(*args)
                    finally:
                        sys.settrace(trace)  # at once: what follows must not be stopped
                        replaced = [name for name in ("stdout", "stderr") if getattr(sys, name) is not printed]
            finally:
                limit.running = False
            if limit.rang:  # the code caught the exception and went on
                outcome = Outcome("unfinished")
    except KeyboardInterrupt:
        raise
    except TimeIsUp as stop:
        outcome = Outcome("unfinished", "", *_place([*_lines_of(stop.__traceback__), *stop.elsewhere], function))
    except BaseException as error:  # SystemExit as well: an answer must not end the rank
        outcome = Outcome("raised", in_short(error), *_place(_lines_of(error.__traceback__), function))
    outcome.printed, outcome.lines_printed, outcome.line_ended = printed.shown(), printed.count(), printed.line_ended()
    outcome.left_changed = f"leaves another sys.{replaced[0]} behind" if replaced else ""
    return result, outcome


@dataclass
class _Limit:
    seconds: float
    running: bool = False
    rang: bool = False


_limits: list[_Limit] = []  # of the attempts under way, the innermost last


def limit_anew() -> None:
    """Allow the attempt that is under way its whole time from now on, unless that was over before: a new case begins.

    So it is long enough for any number of cases, also on a busy machine.
    """
    if _limits and not _limits[-1].rang:
        signal.setitimer(signal.ITIMER_REAL, _limits[-1].seconds, 0.5)


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[_Limit]:
    limit = _Limit(seconds)
    if threading.current_thread() is not threading.main_thread():
        yield limit
        return

    def ring(signum: int, frame: FrameType | None) -> None:
        if limit.running:
            if limit.rang:
                _raise_at_the_next_line(frame)
            limit.rang = True
            raise TimeIsUp

    before = signal.signal(signal.SIGALRM, ring)
    _limits.append(limit)
    signal.setitimer(signal.ITIMER_REAL, seconds, 0.5)  # again and again, for code that goes on
    try:
        yield limit
    finally:
        _limits.pop()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _raise_at_the_next_line(frame: FrameType | None) -> None:
    """End also a loop such as `while True: try: … except BaseException: pass`.

    It catches what is raised in its `try`. A trace function raises once more at the next line that runs, which is in
    its `except`.
    """

    def stop(_: FrameType, event: str, __: Any) -> Callable:
        if event == "line":
            raise TimeIsUp
        return stop

    sys.settrace(stop)
    while frame is not None and frame.f_code is not attempt.__code__:
        frame.f_trace = stop
        frame = frame.f_back


@contextlib.contextmanager
def _group_protected() -> Iterator[None]:
    """Refuse to destroy the default process group, which all cells share, and to make a group in every call."""
    destroy, make = dist.destroy_process_group, dist.distributed_c10d._new_group_with_tag

    def refuse(group: dist.ProcessGroup | None = None) -> None:
        if group is None or group is dist.group.WORLD:
            raise RuntimeError("destroy_process_group would end the process group that all cells share")
        destroy(group)

    def refuse_to_make(*_: Any, **__: Any) -> None:  # new_group and DeviceMesh, however they were imported, end here
        raise RuntimeError("the answer makes a process group in every call: use the one that it has")

    dist.destroy_process_group = dist.distributed_c10d.destroy_process_group = refuse
    dist.distributed_c10d._new_group_with_tag = refuse_to_make
    try:
        yield
    finally:
        dist.destroy_process_group = dist.distributed_c10d.destroy_process_group = destroy
        dist.distributed_c10d._new_group_with_tag = make


def _lines_of(where: TracebackType | None) -> list[tuple[str, int | None]]:
    return [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(where)]


def lines_of_thread(number: int | None) -> list[tuple[str, int | None]]:
    """Where the thread with this identifier is now, as (file, line), the innermost last."""
    inner = sys._current_frames().get(number)
    return [(frame.f_code.co_filename, line) for frame, line in traceback.walk_stack(inner)][::-1] if inner else []


def _place(lines: Sequence[tuple[str, int | None]], function: Callable) -> tuple[int | None, str]:
    """The innermost line of the learner's own code: in the function's file, or in another cell (no file on disk)."""
    own = getattr(getattr(function, "__code__", None), "co_filename", None)
    for file, line in reversed(lines):
        if line is None:  # a signal came between two lines
            continue
        if file == own or (linecache.getline(file, line) and not os.path.exists(file)):
            return line, linecache.getline(file, line).strip()[:SHOWN_WIDTH]
    return None, ""


def in_short(error: BaseException) -> str:
    first = (str(error).strip().splitlines() or [""])[0].rstrip(".")
    return f"{type(error).__name__}: {first[:SHOWN_WIDTH]}" if first else type(error).__name__


class _FirstLines(io.TextIOBase):
    """Keeps the first lines that are printed and counts the others, so that a flood takes no memory."""

    def __init__(self) -> None:
        self._kept, self._line_ends, self._last = "", 0, "\n"

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        room = SHOWN_LINES * SHOWN_WIDTH - len(self._kept)
        self._kept += text[: max(room, 0)]
        self._line_ends += text.count("\n")
        self._last = text[-1:] or self._last
        return len(text)

    def shown(self) -> list[str]:
        return [line[:SHOWN_WIDTH] for line in self._kept.splitlines()[:SHOWN_LINES]]

    def line_ended(self) -> bool:
        return self._last == "\n"

    def count(self) -> int:
        return self._line_ends + (self._last != "\n")


class MessageLog:
    """What this rank sent to and received from each rank of a group, and its collectives in that group, in order.

    members: the group's ranks. Other groups are the answer's own business; `elsewhere` names calls on the default
    group where the answer was given another. `never_waited_for` names asynchronous calls of which nobody took the end.
    `made_by`: which of them torch itself made, to carry objects.
    """

    def __init__(self, members: Sequence[int]):
        self._members = tuple(members)
        self._sent: Counter[int] = Counter()
        self._received: Counter[int] = Counter()
        self._collectives: list[tuple[str, int | None]] = []  # and their roots
        self._from_any_rank: set[Call] = set()
        self._under_way: dict[Call, None] = {}
        self.calls: list[Call] = []  # all of this rank's, in order
        self.made_by: dict[str, str] = {}  # all_gather -> all_gather_object
        self._elsewhere: Counter[str] = Counter()

    def started(self, call: Call) -> None:
        if maker := _object_call():
            self.made_by[call.name] = maker
        self._under_way[call] = None
        self.calls.append(call)
        if call.name in ("send", "recv") and not set(call.members) <= set(self._members):
            self._elsewhere[call.name] += 1
        elif call.name == "send":
            self._sent[call.members[call.peer]] += 1
        elif call.name == "recv" and call.peer is None:
            self._from_any_rank.add(call)
        elif call.name == "recv":
            self._received[call.members[call.peer]] += 1
        elif call.members == self._members:
            self._collectives.append((call.name, call.peer))
        elif not set(call.members) <= set(self._members):
            self._elsewhere[call.name] += 1

    def waited(self, call: Call) -> None:
        self._under_way.pop(call, None)
        if call in self._from_any_rank and call.peer is not None:  # now it is known who sent it
            self._from_any_rank.remove(call)
            self._received[call.members[call.peer]] += 1

    @property
    def never_waited_for(self) -> str:
        """As a complaint; "" if every call was."""
        names = Counter(call.name for call in self._under_way)
        return " and ".join(f"{name} was started and never waited for, {times(n)}" for name, n in names.items())

    def finish(self) -> None:
        """Wait for what was never waited for: until it has ended, gloo writes into tensors that may be freed."""
        for work, call in works_under_way().items():
            if call in self._under_way:
                work.wait()

    @property
    def elsewhere(self) -> str:
        """As a complaint; "" if everything stayed in the group."""
        goes = "goes" if len(self._elsewhere) == 1 else "go"
        names = " and ".join(self._elsewhere)
        return f"{names} {goes} through all ranks, should stay in `group`" if names else ""

    def as_fact(self) -> dict[str, Any]:
        def by_peer(counts: Counter[int]) -> list[int]:
            return [counts[peer] for peer in self._members]

        return {
            "sent": by_peer(self._sent),
            "received": by_peer(self._received),
            "collectives": self._collectives,
            "made_by": self.made_by,
            "elsewhere": self.elsewhere,
        }


def _object_call() -> str:
    """The function for objects, such as all_gather_object, that makes the call now being reported; "" if none does."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_code is not attempt.__code__:
        if frame.f_globals is vars(dist.distributed_c10d) and "_object" in frame.f_code.co_name:
            return frame.f_code.co_name
        frame = frame.f_back
    return ""


def left_over(logs: list[dict[str, Any]]) -> str:
    """What the ranks' logs say is still in the process group, in a sentence; "" if nothing is."""
    for source, log in enumerate(logs):
        for target, sent in enumerate(log["sent"]):
            received = logs[target]["received"][source]
            if sent > received:
                return f"Rank {source} sent to rank {target} {times(sent)}, rank {target} received {times(received)}."
            if sent < received:
                return f"Rank {target} waits for a message that rank {source} never sent."
    if different := _different_roots([log["collectives"] for log in logs]):
        return different
    for rank, log in enumerate(logs):
        if log["collectives"] != logs[0]["collectives"]:
            return (
                f"{ranks([0])} called {_names(logs[0]['collectives'])}, "
                f"{ranks([rank]).lower()} {_names(log['collectives'])}."
            )
    return ""


def left_over_in_a_part(facts: list[dict[str, Any]]) -> tuple[str, str]:
    """What a call has left behind, and in the first case of which that can be said; "" if in none."""
    for parts in zip(*(fact["parts"] for fact in facts), strict=False):
        if behind := left_over([part["log"] for part in parts]):
            return behind, parts[0]["case"]
    return left_over([fact["log"] for fact in facts]), ""


def _different_roots(calls: list[list[tuple[str, int | None]]]) -> str:
    """Which root each rank names, in the first collective where they differ only in that; "" if they don't."""
    for number, made in enumerate(zip_longest(*calls), 1):
        by_root: dict[int | None, list[int]] = {}
        for rank, call in enumerate(made):
            if call is not None:
                by_root.setdefault(call[1], []).append(rank)
        names = {call[0] for call in made if call is not None}
        if len(names) > 1:
            return ""
        if len(by_root) > 1:
            named = [f"{root} on {ranks(members).lower()}" for root, members in by_root.items()]
            return f"The root of collective {number}, a {names.pop()}, is rank {', rank '.join(named)}."
    return ""


def _names(collectives: list[tuple[str, int | None]]) -> str:
    counts = Counter(name for name, _ in collectives)
    return ", ".join(f"{name} {times(number)}" for name, number in counts.items()) or "no collective"
