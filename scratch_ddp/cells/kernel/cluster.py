"""The ranks of one notebook: their start, what arrives from them, their end; and the launcher that starts them."""

import contextlib
import itertools
import os
import queue
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from scratch_ddp.cells.channel import channel_pair
from scratch_ddp.cells.kernel.output import RankOutput
from scratch_ddp.cells.kernel.placement import Placement
from scratch_ddp.cells.kernel.rank_process import RankProcess
from scratch_ddp.cells.kernel.reader import Event, Reader
from scratch_ddp.cells.processes import kill_group
from scratch_ddp.cells.words import ClusterError, RankInterrupt, name_ranks

_START_LIMIT = 120.0  # seconds until a rank must have answered for the first time


class Cluster:
    """`world_size` ranks. Events of all ranks come in through `events` (see `reader`)."""

    def __init__(self, launcher: "LauncherProcess", events: "queue.SimpleQueue[Event]", placement: Placement):
        self.launcher, self.events, self.placement = launcher, events, placement
        self.world_size = len(placement.gpus)
        self.folder = launcher.root / f"cluster {time.monotonic_ns()}"
        self.folder.mkdir()
        self._config = _config(self.folder, self.world_size, placement.backend)
        self.mark: bytes = self._config["mark"].encode()
        self.generation = 0  # how many times the process groups have been renewed
        self.dead: dict[int, str] = {}  # rank → how it ended; such a cluster runs no more cells
        self.late: dict[tuple[int, int], RankOutput] = {}  # (cell, rank) → text that came after its cell had ended
        self._questions = 0
        self.ranks: list[RankProcess] = []
        self.start(range(self.world_size), _START_LIMIT, stoppable=True)

    # Start and end

    def start(self, numbers: Collection[int], limit: float, stoppable: bool = False) -> None:
        """Start these ranks, each in place of the one with its number, and wait until all have groups and shells.

        Raises ClusterError, which says why one has not, or RankInterrupt if Stop is pressed and they are `stoppable`.
        """
        try:
            for number in numbers:
                place = {"rank": number, "gpu_id": self.placement.gpus[number], "generation": self.generation}
                numbers_of_it = {"RANK": str(number), "LOCAL_RANK": str(number)}
                config = self._config | place | {"environment": self._config["environment"] | numbers_of_it}
                self.ranks[number : number + 1] = [self.launcher.start(config)]  # at the end it is added
            self._await_ready([self.ranks[number] for number in numbers], limit, stoppable)
        except BaseException:
            self.shut_down()
            raise

    def _await_ready(self, missing: list[RankProcess], limit: float, stoppable: bool) -> None:
        for event in self.receive(until=time.monotonic() + limit):
            if event.kind == "stop" and stoppable:
                raise RankInterrupt("stopped: no ranks are running.")
            if event.kind == "message" and event.value["type"] == "ready" and event.source in missing:
                missing.remove(event.source)
            if not missing:
                return
            ended = [rank for rank in missing if rank.status is not None or rank.ended]
            if ended:
                lines = "\n".join(ended[0].last_lines(self.mark)).strip()
                raise ClusterError(f"rank {ended[0].rank} {ended[0].how_it_ended()} while it started:\n{lines}")
        silent = name_ranks(rank.rank for rank in missing)
        raise ClusterError(f"{silent} did not answer within {limit:g} s of the start.")

    def shut_down(self) -> None:
        """End every rank and what it has started. Returns when they are gone."""
        for rank in self.ranks:
            rank.launcher.end(rank)
        for rank in self.ranks:
            self.await_status(rank, 2.0)

    # What arrives

    def receive(self, until: float, pause: float = 0.5) -> Iterator[Event]:
        """Events as they arrive, after `_note` has seen them; a "tick" if nothing arrives for `pause` seconds."""
        while (left := until - time.monotonic()) > 0:
            try:
                event = self.events.get(timeout=min(left, pause))
            except queue.Empty:
                yield Event("tick", None)
                continue
            self._note(event)
            yield event

    def _note(self, event: Event) -> None:
        """Keep what an event says about the ranks: device, exit code, closed channel, last and late output."""
        source, message = event.source, event.value
        kind = message["type"] if event.kind == "message" else event.kind
        if kind == "text":
            source.reader.note_taken(len(message))
            source.rank.remember_output(source.cell, message)
            if 0 < source.cell != source.rank.running:
                key = source.cell, source.rank.rank
                self.late.setdefault(key, RankOutput(self.mark, late=True)).read(message)
        elif kind == "gone" and isinstance(source, RankProcess):
            source.gone = True
        elif kind == "ready":
            source.device, source.pid = message["device"], message["pid"]
        elif kind == "renewed":
            source.renewed = message
        elif kind == "launcher ready":  # not needed before
            source.gpu_count = message["gpu_count"]
        elif kind == "ended":
            for rank in self.ranks:
                if rank.number == message["process"] and rank.launcher is source:
                    rank.status, rank.crash = message["status"], message["crash"]
                    rank.note_calls(message["calls"])

    def catch_up(self) -> None:
        """Take in all that has happened since the last cell."""
        for _ in range(self.events.qsize()):  # meanwhile more may arrive, without end
            self._note(self.events.get())
        for rank in self.ranks:
            if not rank.alive and rank.rank not in self.dead:
                self.await_status(rank)
                self.dead[rank.rank] = rank.describe_death()

    def ask(self, ranks: Sequence[int], question: dict[str, Any], seconds: float) -> dict[int, dict[str, Any]]:
        """What idle ranks answer: {rank: answer}. One that takes longer than so many seconds is missing."""
        self._questions += 1
        asked = [self.ranks[rank] for rank in ranks if self.ranks[rank].alive]
        for rank in asked:
            rank.channel.send({"type": "ask", "number": self._questions, **question})
        answers: dict[int, dict[str, Any]] = {}
        events = self.receive(time.monotonic() + seconds, pause=0.1)
        while any(rank.alive and rank.rank not in answers for rank in asked) and (event := next(events, None)):
            message = event.value if event.kind == "message" else {}
            if message.get("number") == self._questions and message["type"] == "answer":
                answers[event.source.rank] = message["found"]
        return answers

    def await_status(self, rank: RankProcess, limit: float = 0.5) -> None:
        """Wait for a rank's exit code, which comes after its channel has been closed."""
        until = time.monotonic() + limit
        while rank.status is None and not rank.ended and (left := until - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                self._note(self.events.get(timeout=left))


class LauncherProcess:
    """A handle on a launcher (see `launcher`). One serves all clusters of a kernel, one after another."""

    name = ""  # of the host, if it is not the kernel's

    def __init__(self, reader: Reader):
        self.reader = reader
        self.root = Path(tempfile.mkdtemp(prefix="scratch-ddp-"))  # readable by this user only
        self.channel, launchers_end = channel_pair()
        self.gpu_count: int | None = None  # known when it is ready
        self._numbers = itertools.count()
        self._started: list[RankProcess] = []
        self._closing = False
        self.log: str | None = None  # what it has written, once it has ended without being asked to
        package = str(Path(__file__).parents[3])
        path = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
        command = "import sys; from scratch_ddp.cells.launcher import main; main(*sys.argv[1:])"
        with (self.root / "launcher.log").open("wb") as log:
            self.process = subprocess.Popen(  # -P: a learner's own random.py must not be taken for Python's
                [sys.executable, "-P", "-c", command, str(launchers_end.fileno()), str(os.getpid()), str(self.root)],
                pass_fds=[launchers_end.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | {"PYTHONPATH": path},
                start_new_session=True,
            )
        launchers_end.close()
        reader.add(self.channel, self)

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def await_ready(self, events: "queue.SimpleQueue[Event]") -> int:
        """Wait until it has imported what ranks need. Returns the number of GPUs. Raises ClusterError."""
        while self.gpu_count is None:
            with contextlib.suppress(queue.Empty):
                event = events.get(timeout=0.2)
                if event.kind == "message" and event.value["type"] == "launcher ready":
                    self.gpu_count = event.value["gpu_count"]
                elif event.kind == "text":  # of an earlier cluster
                    event.source.reader.note_taken(len(event.value))
                continue
            if self.log is not None:
                raise ClusterError(f"the launcher of ranks did not start:\n{self.log}")
        return self.gpu_count

    def start(self, config: dict[str, Any]) -> RankProcess:
        """Start a rank. It says that it is ready through its own channel."""
        channel, ranks_end = channel_pair()
        config = {"process": next(self._numbers)} | config
        rank = RankProcess(config["rank"], channel, self, config["process"])
        output = self.reader.open_pipe(rank, cell=0)
        self.channel.send({"type": "start", "config": config}, (ranks_end.fileno(), output))
        os.close(output)
        ranks_end.close()
        self.reader.add(channel, rank)
        self._started = [*(one for one in self._started if one.alive), rank]
        return rank

    def execute(self, rank: RankProcess, message: dict[str, Any]) -> None:
        """Send a rank the message "execute", with a pipe for its output in this cell."""
        output = self.reader.open_pipe(rank, message["cell"])
        rank.channel.send(message, (output,))
        os.close(output)

    def end(self, rank: RankProcess) -> None:
        """SIGKILL for a rank, through the launcher: only its parent knows that the pid is still this rank's."""
        if rank.status is None:
            self.channel.send({"type": "end", "process": rank.number})

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
            rank.ended = "ended with the process that starts ranks"
            if rank.pid is not None and rank.status is None:
                kill_group(rank.pid)  # the rank has died with the launcher, but not what it had started
        log = self.root / "launcher.log"
        self.log = log.read_text(errors="replace") if log.exists() else ""
        shutil.rmtree(self.root, ignore_errors=True)


def _config(folder: Path, world_size: int, backend: str) -> dict[str, Any]:
    """What is the same for all ranks of a cluster. Environment, directory and path are the kernel's at this moment."""
    environment = dict(os.environ) | {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GLOO_SOCKET_IFNAME": loopback(),
        "NCCL_SOCKET_IFNAME": loopback(),
    }
    return {
        "world_size": world_size,
        "backend": backend,
        "folder": str(folder),
        "mark": secrets.token_hex(8),
        "environment": environment,
        "directory": os.getcwd(),
        "path": list(sys.path),
    }


def loopback() -> str:
    """The name of the loopback interface. Without it gloo listens on the address that the host's name resolves to."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), "lo")
