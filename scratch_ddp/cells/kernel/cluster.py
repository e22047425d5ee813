"""The ranks of one notebook: their start, what arrives from them, their end."""

import contextlib
import os
import queue
import secrets
import socket
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from scratch_ddp.cells.kernel.excerpt import Excerpt
from scratch_ddp.cells.kernel.placement import Placement
from scratch_ddp.cells.kernel.rank_process import LauncherProcess, RankProcess
from scratch_ddp.cells.kernel.reader import Event, Pipe
from scratch_ddp.cells.kernel.reports import ClusterError, RankInterrupt
from scratch_ddp.cells.rank_lists import name_ranks

_LATE = 1 << 14  # bytes of late output that are kept, of its beginning and of its end
_START_LIMIT = 120.0  # seconds until a rank must have answered for the first time
_INTERRUPT_LIMIT = 1.0  # seconds in which a rank that is interrupted in a question should be idle again


class Cluster:
    """`world_size` ranks. Events of all ranks come in through `events` (see `reader`)."""

    def __init__(self, launcher: LauncherProcess, events: "queue.SimpleQueue[Event]", placement: Placement):
        self.launcher, self.events, self.placement = launcher, events, placement
        self.world_size = len(placement.gpus)
        self.folder = launcher.root / f"cluster {time.monotonic_ns()}"
        self.folder.mkdir()
        self._config = _config(self.folder, self.world_size, placement.backend)
        self.mark: bytes = self._config["mark"].encode()
        self.generation = 0  # how many times the process groups have been renewed
        self.rendezvous = 0  # counts the files by which ranks find each other: a new one when all ranks are new
        self.dead: dict[int, str] = {}  # rank → how it ended; such a cluster runs no more cells
        self.late: dict[tuple[int, int], Excerpt] = {}  # (cell, rank) → text that came after its cell had ended
        self.in_doubt = False  # whether a question was interrupted in a collective: the next cell renews the groups
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
                self.ranks[number : number + 1] = [self._start_rank(number)]  # at the end it is added
            self._await_ready([self.ranks[number] for number in numbers], limit, stoppable)
        except BaseException:
            self.shut_down()
            raise

    def _start_rank(self, rank: int) -> RankProcess:
        config = self._config | {"rank": rank, "gpu_id": self.placement.gpus[rank]}
        config |= {"generation": self.generation, "rendezvous": self.rendezvous}
        config["environment"] = config["environment"] | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        return self.launcher.start(config, self.folder)

    def _await_ready(self, missing: list[RankProcess], limit: float, stoppable: bool) -> None:
        for event in self.receive(until=time.monotonic() + limit):
            if event.kind == "stop" and stoppable:
                raise RankInterrupt("stopped: no ranks are running.")
            if event.kind == "message" and event.value["type"] == "ready" and event.source in missing:
                missing.remove(event.source)
                event.source.device = event.value["device"]
            if not missing:
                return
            ended = [rank for rank in missing if rank.status is not None or rank.launcher_lost]
            if ended:
                lines = "\n".join(ended[0].last_lines).strip()
                raise ClusterError(f"rank {ended[0].rank} {ended[0].how_it_ended()} while it started:\n{lines}")
        silent = name_ranks(rank.rank for rank in missing)
        raise ClusterError(f"{silent} did not answer within {limit:g} s of the start.")

    def shut_down(self) -> None:
        """End every rank and what it has started. Returns when they are gone."""
        for rank in self.ranks:
            self.launcher.end(rank)
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
        """Keep what an event says about the ranks' processes: pid, exit code, closed channel, last output."""
        if event.kind == "text":
            event.source.take(len(event.value))
            event.source.rank.remember_output(event.source.cell, event.value)
        elif event.kind == "gone" and isinstance(event.source, RankProcess):
            event.source.gone = True
        elif event.kind == "message" and event.value["type"] == "started":
            self.ranks[event.value["rank"]].pid = event.value["pid"]
        elif event.kind == "message" and event.value["type"] == "renewed":
            event.source.renewed = event.value
        elif event.kind == "message" and event.value["type"] == "answer":
            self.in_doubt |= bool((event.value["interrupted_in"] or {}).get("waits_in"))
        elif event.kind == "message" and event.value["type"] == "launcher ready":  # not needed before
            event.source.gpu_count = event.value["gpu_count"]
        elif event.kind == "message" and event.value["type"] == "ended":
            for rank in self.ranks:
                if rank.pid == event.value["pid"] and event.source in (self.launcher, rank):
                    rank.status = event.value["status"]

    def catch_up(self) -> None:
        """Take in all that has happened since the last cell."""
        for _ in range(self.events.qsize()):  # meanwhile more may arrive, without end
            self._take_between_cells(self.events.get())
        for rank in self.ranks:
            if not rank.alive and rank.rank not in self.dead:
                self.await_status(rank)
                self.dead[rank.rank] = rank.describe_death()

    def _take_between_cells(self, event: Event) -> None:
        self._note(event)
        self.keep_late(event)

    def keep_late(self, event: Event) -> None:
        """Keep output of a cell that has ended. It is shown with the next cell."""
        if event.kind == "text" and isinstance(event.source, Pipe) and event.source.cell > 0:
            self._add_late(event.source.cell, event.source.rank, event.value)
        elif event.kind == "message" and event.value["type"] == "display" and event.source in self.ranks:
            kinds = ", ".join(event.value["data"])
            self._add_late(event.value["cell"], event.source, f"<{kinds}>\n".encode())

    def _add_late(self, cell: int, rank: RankProcess, text: bytes) -> None:
        self.late.setdefault((cell, rank.rank), Excerpt(_LATE, _LATE)).add(text)

    def ask(self, ranks: Sequence[int], question: dict[str, Any], seconds: float) -> dict[int, dict[str, Any]]:
        """What idle ranks answer (see `rank/questions.py`) within that time; {} for one that knows nothing.

        Must not be called while a cell runs. A rank that takes longer is interrupted, and missing in what is returned.
        """
        self._questions += 1
        number = -self._questions  # cells have positive numbers
        answers: dict[int, dict[str, Any]] = {}
        asked = [self.ranks[rank] for rank in ranks if self.ranks[rank].alive]
        for rank in asked:
            rank.channel.send({"type": "ask", "cell": number, **question})
        try:
            self._collect(answers, number, asked, seconds)
        finally:  # also at a Stop
            late = [rank for rank in asked if rank.alive and rank.rank not in answers]
            for rank in late:
                rank.channel.send({"type": "interrupt", "cell": number, "number": 1, "together": False})
            self._collect({}, number, late, _INTERRUPT_LIMIT)
        return answers

    def _collect(self, answers: dict[int, Any], number: int, asked: Sequence[RankProcess], seconds: float) -> None:
        until = time.monotonic() + seconds
        while any(rank.alive and rank.rank not in answers for rank in asked):
            event = next(self.receive(until, pause=0.1), None)
            if event is None:
                return
            self.keep_late(event)
            if event.kind == "message" and event.value["type"] == "answer" and event.value["cell"] == number:
                answers[event.source.rank] = event.value["found"]

    def await_status(self, rank: RankProcess, limit: float = 0.5) -> None:
        """Wait for a rank's exit code, which comes after its channel has been closed."""
        until = time.monotonic() + limit
        while rank.status is None and not rank.launcher_lost and (left := until - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                self._take_between_cells(self.events.get(timeout=left))


def _config(folder: Path, world_size: int, backend: str) -> dict[str, Any]:
    """What is the same for all ranks of a cluster. Environment, directory and path are the kernel's at this moment."""
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
        "path": list(sys.path),
    }


def _loopback() -> str:
    """The name of the loopback interface. Without it gloo listens on the address that the host's name resolves to."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), "lo")
