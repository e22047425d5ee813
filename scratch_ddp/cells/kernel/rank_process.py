"""A rank as the kernel sees it: its process and how it ended, and what it does in one cell."""

import re
import signal
import time
from dataclasses import dataclass, field
from typing import Any

from scratch_ddp.cells.channel import Channel
from scratch_ddp.cells.flight_recorder import Record
from scratch_ddp.cells.kernel.output import without_marks

_LAST_OUTPUT = 1 << 13  # bytes
_LONG = 2.0  # seconds


@dataclass(eq=False)
class RankProcess:
    """One rank. `place` is how far it has come (see `interruptible_group.place`), with what it has under way."""

    rank: int
    channel: Channel
    launcher: Any  # the `LauncherProcess` or `Host` that has started it
    number: int  # of the process, among those of its launcher
    pid: int | None = None
    device: str = ""
    status: int | None = None  # exit code; -n for signal n
    gone: bool = False  # its end of the channel is closed
    ended: str = ""  # how it ended, where nobody is left to learn its exit code
    renewed: dict[str, Any] | None = None  # its answer, once it has fresh process groups
    place: dict[str, Any] = field(default_factory=lambda: {"open": [], "begun": {}, "members": {}})
    cell: int = 0  # the last that it was given
    running: int = 0  # the same, until it is done with it
    last_output: bytes = b""  # the end of what it has written in that cell
    calls: dict[tuple[str, int], str] = field(default_factory=dict)  # last in that cell: (group, number in it) → words
    crash: str = ""  # what Python's faulthandler has written

    @property
    def alive(self) -> bool:
        return self.status is None and not self.gone

    def on_gone(self) -> None:
        """Called by the reader's thread when the channel is closed. The kernel's main thread gets an event."""

    def begin_cell(self, cell: int) -> None:
        self.cell = self.running = cell
        self.last_output, self.calls = b"", {}

    def note_calls(self, records: list[Record]) -> None:
        """The collectives and messages that it has called last, as it says itself, or has left in its file."""
        self.calls = {(group, number): words for cell, group, number, words in records if cell == self.cell}

    def remember_output(self, cell: int, data: bytes) -> None:
        """Keep the end of its output in its last cell, in case it dies."""
        if cell == self.cell:
            self.last_output = (self.last_output + data)[-_LAST_OUTPUT:]

    def last_lines(self, mark: bytes) -> list[str]:
        """The last lines of that, without the marks in it (see `output`)."""
        output = self.last_output
        before, end, after = output.partition(b"\0")
        if len(output) == _LAST_OUTPUT and end and not after.startswith(mark):
            output = after  # it began within a mark
        return without_marks(output, mark).split("\n")[-8:]

    def describe_death(self) -> str:
        """How it ended, in which line of the cell, and what it had called last."""
        text = f"rank {self.rank} {self.how_it_ended()}"
        if line := re.search(r'(?:<ipython|ipython-input|ipykernel_).*", line (\d+)', self.crash):
            text += f" in line {line[1]} of the cell"
        if self.calls:
            text += f"; its last call: {next(reversed(self.calls.values()))}"
        return text

    def how_it_ended(self) -> str:
        """ "was ended by SIGKILL (…)", "left with exit code 3"."""
        if self.status is None:
            return self.ended or "closed its connection"
        if self.status >= 0:
            return f"left with exit code {self.status}"
        name = signal.Signals(-self.status).name
        if name == "SIGKILL":
            return "was ended by SIGKILL (somebody ended it, or the machine ran out of memory)"
        return f"was ended by {name}"


class RankInCell:
    """A rank in one cell: where it is, as far as it has said, and how it ended there."""

    def __init__(self, process: RankProcess, takes_part: bool = True):
        self.process, self.takes_part = process, takes_part
        self.said: dict[str, Any] = {}  # its last answer to the question where it is
        self.waits_since = time.monotonic()  # in the call that it has named
        self.done = False
        self.error: dict[str, Any] | None = None
        self.interrupted_in: dict[str, Any] | None = None  # where it was when it was interrupted

    def note(self, message: dict[str, Any]) -> None:
        """A message "state" or "done"."""
        self.process.place = message
        self.process.note_calls(message["calls"])
        if message["type"] == "done":
            self.done, self.error, self.interrupted_in = True, message["error"], message["interrupted_in"]
            self.process.running = 0
            return
        if message["waits_in"] is None or message["waits_in"] != self.said.get("waits_in"):
            self.waits_since = time.monotonic()
        self.said = message

    @property
    def running(self) -> bool:
        return self.takes_part and not self.done and self.process.alive

    @property
    def state(self) -> str:
        """In words. A rank that was interrupted counts as "running" where it was."""
        if not self.takes_part:
            return "not in this cell"
        if not self.process.alive:
            return "died"
        if self.done and self.interrupted_in is None:
            return "raised" if self.error else "finished the cell"
        return "running"

    @property
    def line(self) -> int | None:
        """The line of the cell that it is in, if that is known."""
        return (self.interrupted_in or self.said).get("line") if self.state == "running" else None

    @property
    def waits_in(self) -> dict[str, Any] | None:
        """The collective or message that it waits in, if it does."""
        return (self.interrupted_in or self.said).get("waits_in") if self.state == "running" else None

    def waits_for_long(self) -> bool:
        return self.said.get("waits_in") is not None and time.monotonic() - self.waits_since > _LONG

    def calls(self) -> dict[tuple[str, int], str]:
        """What it has called last in this cell."""
        return self.process.calls if self.takes_part else {}
