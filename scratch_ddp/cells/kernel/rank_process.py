"""A rank as the kernel sees it: its process, its channel, what it has called, and how it ended."""

import re
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scratch_ddp.cells.channel import Channel
from scratch_ddp.cells.flight_recorder import read_calls

_SIGNAL_MEANING = {
    signal.SIGKILL: "somebody ended it, or the machine ran out of memory",
    signal.SIGSEGV: "native code accessed memory that is not its own",
    signal.SIGABRT: "native code aborted",
    signal.SIGBUS: "native code accessed memory that does not exist",
}
_LAST_OUTPUT = 4096  # bytes


@dataclass(eq=False)
class RankProcess:
    """One rank. `place` is how far it has come (see `interruptible_group.place`), with what it has under way."""

    rank: int
    folder: Path
    channel: Channel
    host: str = ""  # where it runs, if not on the kernel's machine
    pid: int | None = None
    device: str = ""
    status: int | None = None  # exit code; -n for signal n
    gone: bool = False  # its end of the channel is closed
    ended: str = ""  # how it ended, where nobody is left to learn its exit code
    renewed: dict[str, Any] | None = None  # its answer, once it has fresh process groups
    place: dict[str, Any] = field(default_factory=lambda: {"open": [], "begun": {}, "members": {}})
    cell: int = 0  # the last that it was given
    last_output: bytes = b""  # the end of what it has written in that cell

    @property
    def alive(self) -> bool:
        return self.status is None and not self.gone

    def on_gone(self) -> None:
        """Called by the reader's thread when the channel is closed. The kernel's main thread gets an event."""

    def begin_cell(self, cell: int) -> None:
        self.cell, self.last_output = cell, b""

    def remember_output(self, cell: int, data: bytes) -> None:
        """Keep the end of its output in its last cell, in case it dies."""
        if cell == self.cell:
            self.last_output = (self.last_output + data)[-_LAST_OUTPUT:]

    @property
    def last_lines(self) -> list[str]:
        text = re.sub("\0[^\0]*\0", "", self.last_output.decode(errors="replace"))  # without marks (see `output`)
        return text.split("\n")[-8:]

    def describe_death(self) -> str:
        """How it ended, in which line of the cell, and what it had called last."""
        text = f"rank {self.rank} {self.how_it_ended()}"
        crash = self.folder / f"crash of rank {self.rank}"  # written by Python's faulthandler
        written = crash.read_text(errors="replace") if crash.exists() else ""
        if line := re.search(r'(?:<ipython|ipython-input|ipykernel_).*", line (\d+)', written):
            text += f" in line {line[1]} of the cell"
        if called := self.last_call():
            text += f"; its last call: {called}"
        return text

    def how_it_ended(self) -> str:
        """ "was ended by SIGKILL (…)", "left with exit code 3"."""
        if self.status is None:
            return self.ended or "closed its connection"
        if self.status >= 0:
            return f"left with exit code {self.status}"
        number = signal.Signals(-self.status)
        meaning = _SIGNAL_MEANING.get(number)
        return f"was ended by {number.name}" + (f" ({meaning})" if meaning else "")

    def calls(self) -> dict[tuple[str, int], str]:
        """The collectives and messages that it called last in its last cell (see `read_calls`)."""
        return read_calls(self.folder, self.rank, self.cell)

    def last_call(self) -> str:
        """The last of them; empty if there was none."""
        return next(reversed(self.calls().values()), "")
