"""A rank as the kernel sees it, and the launcher that starts it."""

import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scratch_ddp.cells.channel import Link, link_pair
from scratch_ddp.cells.kernel.reader import Pipe, Reader
from scratch_ddp.cells.processes import end_group

_SIGNAL_MEANING = {
    signal.SIGKILL: "somebody ended it, or the machine ran out of memory",
    signal.SIGSEGV: "native code reached for memory that is not its own",
    signal.SIGABRT: "native code gave up",
    signal.SIGBUS: "native code reached for memory that does not exist",
}


@dataclass(eq=False)
class RankProcess:
    """One rank: its process, its link, and how it ended if it has."""

    rank: int
    folder: Path
    link: Link
    pid: int | None = None
    device: str = ""
    status: int | None = None  # exit code; -n for signal n
    gone: bool = False  # its end of the link is closed
    launcher_lost: bool = False  # nobody is left to learn its exit code
    renewed: dict[str, Any] | None = None  # its answer, once it has fresh process groups
    last_words: list[str] = field(default_factory=list)
    words_of_cell: int = 0

    @property
    def alive(self) -> bool:
        return self.status is None and not self.gone

    def send(self, message: dict[str, Any], files: tuple[int, ...] = ()) -> None:
        """Send a message; one that is dead does not get it, and its death is reported by other means."""
        with contextlib.suppress(OSError):
            self.link.send(message, files)

    def on_gone(self) -> None:
        """The reader's word that the link is closed; the kernel learns it by an event."""

    def remember_words(self, cell: int, text: str) -> None:
        """Keep the last lines that it said in its last cell, in case it dies."""
        if cell != self.words_of_cell:
            self.words_of_cell, self.last_words = cell, []
        text = re.sub("\0[^\0]*\0", "", text)  # the marks between streams
        lines = ("".join(self.last_words[-1:]) + text).split("\n")
        self.last_words = (self.last_words[:-1] + lines)[-8:]

    def how_it_ended(self) -> str:
        """ "was ended by SIGKILL (…)", "left with exit code 3"."""
        if self.status is None:
            return "ended with the process that starts ranks" if self.launcher_lost else "closed its connection"
        if self.status >= 0:
            return f"left with exit code {self.status}"
        number = signal.Signals(-self.status)
        meaning = _SIGNAL_MEANING.get(number)
        return f"was ended by {number.name}" + (f" ({meaning})" if meaning else "")

    def line_of_crash(self) -> int | None:
        """The line of the cell in which native code died, from what Python's faulthandler wrote."""
        path = self.folder / f"crash of rank {self.rank}"
        for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
            if "ipython-input" in line or "<ipython" in line or "ipykernel_" in line:
                words = line.split(", line ")
                if len(words) == 2 and words[1].split()[0].isdigit():
                    return int(words[1].split()[0])
        return None


class LauncherProcess:
    """The kernel's handle on its launcher (see `launcher`). One serves all clusters of a kernel, one after another."""

    def __init__(self, reader: Reader):
        self.reader = reader
        self.root = Path(tempfile.mkdtemp(prefix="scratch-ddp-"))  # readable by this user only
        self.link, its_end = link_pair()
        self.gpu_count: int | None = None  # known when it is ready
        self._started: list[RankProcess] = []
        self._closing = False
        package = str(Path(__file__).parents[3])
        path = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
        command = "import sys; from scratch_ddp.cells.launcher import main; main(*sys.argv[1:])"
        with (self.root / "launcher.log").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", command, str(its_end.fileno()), str(os.getpid()), str(self.root)],
                pass_fds=[its_end.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | {"PYTHONPATH": path, "MPLBACKEND": "module://matplotlib_inline.backend_inline"},
                start_new_session=True,
            )
        its_end.close()
        reader.add_link(self.link, self)

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def log(self) -> str:
        return (self.root / "launcher.log").read_text(errors="replace")

    def start(self, config: dict[str, Any], folder: Path) -> RankProcess:
        """Start a rank. Its "hello" comes by its own link, its pid by the launcher's."""
        link, its_end = link_pair()
        rank = RankProcess(config["rank"], folder, link)
        out, err = self.open_pipes(rank, cell=0)
        self._send({"type": "start", "config": config}, (its_end.fileno(), out, err))
        for file in (out, err):
            os.close(file)
        its_end.close()
        self.reader.add_link(link, rank)
        self._started = [*(one for one in self._started if one.alive), rank]
        return rank

    def open_pipes(self, rank: RankProcess, cell: int) -> tuple[int, int]:
        """Two new pipes that the reader reads; returns their write ends."""
        ends = []
        for stream in (1, 2):
            read_end, write_end = os.pipe()
            self.reader.add_pipe(read_end, Pipe(rank, cell, stream))
            ends.append(write_end)
        return ends[0], ends[1]

    def end(self, rank: RankProcess) -> None:
        """SIGKILL, through the launcher, which alone knows that the number is still this rank's."""
        if rank.pid is not None and rank.status is None:
            self._send({"type": "end", "pid": rank.pid})

    def close(self) -> None:
        """End the launcher and with it every rank. Returns when it is gone."""
        self._closing = True
        self.link.close_for_good()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(2)
        shutil.rmtree(self.root, ignore_errors=True)

    def on_gone(self) -> None:
        """The reader's word that the launcher is gone. If nobody asked it to go, do what it can't do any more."""
        if self._closing:
            return
        for rank in self._started:
            rank.launcher_lost = True
            if rank.pid is not None and rank.status is None:
                end_group(rank.pid)  # the rank has died with the launcher, what it had started has not
        shutil.rmtree(self.root, ignore_errors=True)

    def _send(self, message: dict[str, Any], files: tuple[int, ...] = ()) -> None:
        with contextlib.suppress(OSError):
            self.link.send(message, files)


def base_config(folder: Path, world_size: int, backend: str) -> dict[str, Any]:
    """What all ranks of a cluster are told alike; the environment, directory and path are the kernel's of now."""
    environment = dict(os.environ) | {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GLOO_SOCKET_IFNAME": _loopback(),
        "NCCL_SOCKET_IFNAME": _loopback(),
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
    }
    return {
        "world_size": world_size,
        "backend": backend,
        "folder": str(folder),
        "mark": secrets.token_hex(8),
        "environment": environment,
        "directory": os.getcwd(),
        "path": sys.path,
        "generation": 0,
    }


def _loopback() -> str:
    """The name of the loopback interface: gloo would otherwise listen where the host's name points to."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), "lo")


def config_of(base: dict[str, Any], rank: int, gpu: int | None) -> dict[str, Any]:
    environment = base["environment"] | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    return json.loads(json.dumps(base | {"rank": rank, "gpu_id": gpu, "environment": environment}))
