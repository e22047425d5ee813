"""One call of a learner's function on this rank: bounded in time, its output caught, whatever it raises kept."""

import contextlib
import io
import linecache
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from types import FrameType, TracebackType
from typing import Any

import torch.distributed as dist

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

    def as_fact(self) -> dict[str, Any]:
        return asdict(self)


class TimeIsUp(BaseException):
    """Raised inside the learner's code; not an Exception, so that `except Exception` lets it pass."""


def attempt(function: Callable, args: tuple, seconds: float) -> tuple[Any, Outcome]:
    """Call the function; return (its result or None, how it ended). KeyboardInterrupt passes through.

    The limit works by a signal, so in the main thread only, and only where the code waits in Python: in a rank cell's
    own process group, not inside gloo or NCCL themselves.
    """
    printed = _FirstLines()
    result, outcome = None, Outcome("returned")
    try:
        with _time_limit(seconds) as limit:
            try:
                with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed), _group_protected():
                    limit.running = True
                    result = function(*args)
            finally:
                limit.running = False
            if limit.rang:  # it caught the signal and went on
                outcome = Outcome("unfinished")
    except KeyboardInterrupt:
        raise
    except TimeIsUp as stop:
        outcome = Outcome("unfinished", "", *_place(stop.__traceback__, function))
    except BaseException as error:  # SystemExit as well: an answer must not end the rank
        outcome = Outcome("raised", _in_short(error), *_place(error.__traceback__, function))
    outcome.printed, outcome.lines_printed = printed.shown(), printed.count()
    return result, outcome


@dataclass
class _Limit:
    running: bool = False
    rang: bool = False


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[_Limit]:
    limit = _Limit()
    if threading.current_thread() is not threading.main_thread():
        yield limit
        return

    def ring(signum: int, frame: FrameType | None) -> None:
        if limit.running:
            limit.rang = True
            raise TimeIsUp

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)  # again each second, for code that catches it and goes on
    try:
        yield limit
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def _group_protected() -> Iterator[None]:
    """The default process group belongs to all cells: refuse to destroy it. An answer's own groups are its own."""
    destroy = dist.destroy_process_group

    def refuse(group: dist.ProcessGroup | None = None) -> None:
        if group is None or group is dist.group.WORLD:
            raise RuntimeError("destroy_process_group would end the process group that all cells share")
        destroy(group)

    dist.destroy_process_group = dist.distributed_c10d.destroy_process_group = refuse
    try:
        yield
    finally:
        dist.destroy_process_group = dist.distributed_c10d.destroy_process_group = destroy


def _place(where: TracebackType | None, function: Callable) -> tuple[int | None, str]:
    """The innermost line of the learner's own code: of the function's file, or of another cell (no file on disk)."""
    own = getattr(getattr(function, "__code__", None), "co_filename", None)
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(where)]
    for file, line in reversed(frames):
        if line is None:  # a signal came between two lines
            continue
        if file == own or (linecache.getline(file, line) and not os.path.exists(file)):
            return line, linecache.getline(file, line).strip()[:SHOWN_WIDTH]
    return None, ""


def _in_short(error: BaseException) -> str:
    first = (str(error).strip().splitlines() or [""])[0].rstrip(".")
    return f"{type(error).__name__}: {first[:SHOWN_WIDTH]}" if first else type(error).__name__


class _FirstLines(io.TextIOBase):
    """Keeps the beginning of what is printed and counts the rest, so that a flood takes no memory."""

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

    def count(self) -> int:
        return self._line_ends + (self._last != "\n")
