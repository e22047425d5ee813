"""A rank as the kernel sees it, and the launcher process that starts it."""

import contextlib
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scratch_ddp.cells.channel import Channel, channel_pair
from scratch_ddp.cells.flight_recorder import read_calls
from scratch_ddp.cells.kernel.reader import Event, Reader
from scratch_ddp.cells.kernel.reports import ClusterError
from scratch_ddp.cells.processes import kill_group

_SIGNAL_MEANING = {
    signal.SIGKILL: "somebody ended it, or the machine ran out of memory",
    signal.SIGSEGV: "native code accessed memory that is not its own",
    signal.SIGABRT: "native code aborted",
    signal.SIGBUS: "native code accessed memory that does not exist",
}
_LAST_OUTPUT = 4096  # bytes
_LAUNCHER_START_LIMIT = 120.0  # seconds


@dataclass(eq=False)
class RankProcess:
    """One rank: its process, its channel, and how it ended if it has."""

    rank: int
    folder: Path
    channel: Channel
    pid: int | None = None
    device: str = ""
    status: int | None = None  # exit code; -n for signal n
    gone: bool = False  # its end of the channel is closed
    launcher_lost: bool = False  # nobody is left to learn its exit code
    host: str = ""  # where it runs, if not on the kernel's machine
    lost_with: str = ""  # how that host was lost
    renewed: dict[str, Any] | None = None  # its answer, once it has fresh process groups
    open_calls: list[dict[str, Any]] = field(default_factory=list)  # what it has under way
    begun: dict[str, int] = field(default_factory=dict)  # how many collectives it has begun in each group, by uid
    cell: int = 0  # the last that it was given
    last_output: bytes = b""  # the end of what it has written in that cell
    numbers: list[int] = field(default_factory=list)  # the notebook's numbers of all cells that it was given
    lost: list[int] = field(default_factory=list)  # the same of the process that it replaces

    @property
    def alive(self) -> bool:
        return self.status is None and not self.gone

    def on_gone(self) -> None:
        """Called by the reader's thread when the channel is closed. The kernel's main thread gets an event."""

    def begin_cell(self, cell: int, number: int) -> None:
        self.cell, self.last_output = cell, b""
        self.numbers.append(number)

    def note_calls(self, message: dict[str, Any]) -> None:
        """Remember what the rank says of its calls (see `interruptible_group.open_calls`)."""
        self.open_calls, self.begun = message["open"], message["begun"]

    def replaces(self, other: "RankProcess") -> None:
        """Remember which cells had run in the other process; the one in which it got stuck is not among them."""
        self.lost = sorted({*other.lost, *other.numbers[:-1]})

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
        if line := self._line_of_crash():
            text += f" in line {line} of the cell"
        if called := self.last_call():
            text += f"; its last call: {called}"
        return text

    def how_it_ended(self) -> str:
        """ "was ended by SIGKILL (…)", "left with exit code 3"."""
        if self.status is None and self.lost_with:
            return self.lost_with
        if self.status is None:
            return "ended with the process that starts ranks" if self.launcher_lost else "closed its connection"
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

    def _line_of_crash(self) -> int | None:
        """The line of the cell in which native code crashed, from what Python's faulthandler wrote."""
        path = self.folder / f"crash of rank {self.rank}"
        text = path.read_text(errors="replace") if path.exists() else ""
        found = re.search(r'(?:<ipython|ipython-input|ipykernel_).*", line (\d+)', text)
        return int(found[1]) if found else None


class LauncherProcess:
    """The kernel's handle on its launcher (see `launcher`). One serves all clusters of a kernel, one after another."""

    def __init__(self, reader: Reader):
        self.reader = reader
        self.root = Path(tempfile.mkdtemp(prefix="scratch-ddp-"))  # readable by this user only
        self.channel, launchers_end = channel_pair()
        self.gpu_count: int | None = None  # known when it is ready
        self._started: list[RankProcess] = []
        self._closing = False
        self._last_log = ""
        package = str(Path(__file__).parents[3])
        path = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
        command = "import sys; from scratch_ddp.cells.launcher import main; main(*sys.argv[1:])"
        with (self.root / "launcher.log").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", command, str(launchers_end.fileno()), str(os.getpid()), str(self.root)],
                pass_fds=[launchers_end.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | {"PYTHONPATH": path, "MPLBACKEND": "module://matplotlib_inline.backend_inline"},
                start_new_session=True,
            )
        launchers_end.close()
        reader.add_channel(self.channel, self)

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def await_ready(self, events: "queue.SimpleQueue[Event]") -> int:
        """Wait until it has imported what ranks need. Returns the number of GPUs. Raises ClusterError."""
        until = time.monotonic() + _LAUNCHER_START_LIMIT
        while self.gpu_count is None:
            try:
                event = events.get(timeout=0.2)
            except queue.Empty:
                if not self.alive:
                    raise ClusterError(f"the launcher of ranks did not start:\n{self.log()}") from None
                if time.monotonic() > until:
                    raise ClusterError("the launcher of ranks has not answered for two minutes.") from None
                continue
            if event.kind == "message" and event.value["type"] == "launcher ready":
                self.gpu_count = event.value["gpu_count"]
        return self.gpu_count

    def log(self) -> str:
        """What it has written: why it has ended."""
        path = self.root / "launcher.log"
        return path.read_text(errors="replace") if path.exists() else self._last_log

    def start(self, config: dict[str, Any], folder: Path) -> RankProcess:
        """Start a rank. It says that it is ready through its own channel; its pid comes through the launcher's."""
        channel, ranks_end = channel_pair()
        rank = RankProcess(config["rank"], folder, channel)
        out, err = self.open_pipes(rank, cell=0)
        self.channel.send({"type": "start", "config": config}, (ranks_end.fileno(), out, err))
        for file in (out, err):
            os.close(file)
        ranks_end.close()
        self.reader.add_channel(channel, rank)
        self._started = [*(one for one in self._started if one.alive), rank]
        return rank

    def open_pipes(self, rank: RankProcess, cell: int) -> tuple[int, ...]:
        """Pipes for a rank's output in a cell (see `Reader`). The caller must close them."""
        return self.reader.open_pipes(rank, cell)

    def end(self, rank: RankProcess) -> None:
        """SIGKILL for a rank, through the launcher: only its parent knows that the number is still this rank's."""
        if rank.status is None:
            self.channel.send({"type": "end", "rank": rank.rank})

    def close(self) -> None:
        """End the launcher and with it every rank. Returns when it is gone."""
        self._closing = True
        self.channel.shut_down()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(2)
        shutil.rmtree(self.root, ignore_errors=True)

    def on_gone(self) -> None:
        """Called by the reader's thread when the launcher is gone. Unless that was asked for, do its work."""
        if self._closing:
            return
        for rank in self._started:
            rank.launcher_lost = True
            if rank.pid is not None and rank.status is None:
                kill_group(rank.pid)  # the rank has died with the launcher, but not what it had started
        self._last_log = self.log()
        shutil.rmtree(self.root, ignore_errors=True)
