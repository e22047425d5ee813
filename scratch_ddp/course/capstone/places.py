"""Where in a learner's file something happened, in words."""

import linecache
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from pathlib import Path

START = 30.0
OTHERS = 3.0  # seconds that ranks get to say where they are, after the first has
WAITS = "waits in vain"
LOST = ("Timed out", "timed out", "timeout", "Connection closed", "Connection reset", "Broken pipe")  # what gloo says


def where(path: Path, frames: Iterable[traceback.FrameSummary]) -> str:
    """The innermost of the frames that is in the file: "my_ddp.py, line 12: `dist.all_reduce(flat)`", or ""."""
    inside = [frame.lineno for frame in frames if frame.filename == str(path)]
    if not inside:
        return ""
    return f"{path.name}, line {inside[-1]}: `{linecache.getline(str(path), inside[-1]).strip()}`"


def in_words(path: Path, error: BaseException) -> str:
    """An error in a line; that a rank waited in vain, where gloo says so."""
    place = where(path, traceback.extract_tb(error.__traceback__))
    if isinstance(error, RuntimeError) and any(words in str(error) for words in LOST):
        return f"{WAITS} at {place}" if place else f"{WAITS}, outside of {path.name}"
    text = " ".join(f"raises {type(error).__name__}: {error}".split())[:300]
    return f"{text} ({place})" if place else text


class Watchdog:
    """Ends this process when it has not called `beat()` for `patience` seconds, and leaves a file that says where.

    Until the first `beat()` it waits START seconds longer: on a busy machine, imports take that.
    """

    def __init__(self, path: Path, report: Path, patience: float):
        self.path, self.report, self.patience = path, report, patience
        self.main = threading.main_thread().ident
        self.last = time.monotonic() + START
        threading.Thread(target=self._watch, daemon=True).start()

    def beat(self) -> None:
        self.last = time.monotonic()

    def _watch(self) -> None:
        while time.monotonic() < self.last + self.patience:
            time.sleep(0.1)
        frames = traceback.extract_stack(sys._current_frames()[self.main])
        self.before_end()
        partial = self.report.with_name(f"partial.{self.report.name}")
        partial.write_text(f"waits at {where(self.path, frames) or f'a place outside of {self.path.name}'}")
        partial.rename(self.report)
        time.sleep(OTHERS + 1)  # an end of this rank would end the others before they have said where they are
        os._exit(1)

    def before_end(self) -> None:
        """What else to leave behind."""
