"""The hosts of a cluster as the kernel sees them. `Hosts` takes the launcher's place: it starts and ends ranks."""

import base64
import contextlib
import queue
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scratch_ddp.cells.hosts.key_board import KeyBoard
from scratch_ddp.cells.hosts.tls_channel import TlsChannel
from scratch_ddp.cells.kernel.rank_process import RankProcess
from scratch_ddp.cells.kernel.reader import Event, Pipe

FILES = ("calls", "crash")  # of a rank, which an agent sends along: "calls of rank 2"
_FROM_KERNEL = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_SENT = ("rank", "world_size", "backend", "mark", "gpu_id", "generation", "rendezvous")


class Host:
    """A host whose agent has entered. Its messages arrive in a thread of its own, and become `events`."""

    def __init__(self, channel: TlsChannel, hello: dict[str, Any], events: "queue.SimpleQueue[Event]"):
        self.channel, self.events = channel, events
        self.name: str = hello["name"]
        self.address: str = hello["address"]
        self.node: int | None = hello["node"]
        self.gpu_count: int | None = None  # known when it is ready
        self.failure: str = ""  # why it can't start ranks
        self.lost = ""  # how it was lost: "has ended", "no longer answers"
        self._board: KeyBoard | None = None
        self._ranks: dict[int, RankProcess] = {}  # by the number that the kernel has given to the process
        threading.Thread(target=self._read, name="reads-from-host", daemon=True).start()

    @property
    def ready(self) -> bool:
        return self.gpu_count is not None and not self.lost

    def start(self, config: dict[str, Any], folder: Path, board: KeyBoard) -> RankProcess:
        """Start a rank there. Directory, path and environment are the agent's, not the kernel's."""
        self._board = board
        number = len(self._ranks)
        process = RankProcess(config["rank"], folder, _ToRank(self.channel, number), host=self.name)
        self._ranks[number] = process
        config = {key: config[key] for key in _SENT} | {"environment": config["environment"]}
        self.channel.send({"type": "start", "process": number, "config": config})
        if self.lost:
            self._lose(process)
        return process

    def end(self, process: RankProcess) -> None:
        self.channel.send({"type": "end", "process": process.channel.number})

    def let_go(self) -> None:
        """The agent ends its ranks and itself."""
        self.channel.send({"type": "let go"})
        self.channel.end_sending()

    # In the thread

    def _read(self) -> None:
        try:
            while True:
                for message in self.channel.receive():
                    self._take(message)
        except EOFError as error:
            self.lost = str(error)
        except (KeyError, TypeError, ValueError, AttributeError):
            self.lost = "has sent what no agent sends"
        self.channel.shut_down()
        self.channel.close()
        for process in list(self._ranks.values()):
            self._lose(process)

    def _lose(self, process: RankProcess) -> None:
        process.launcher_lost = True
        how = "which no longer answers" if self.lost == "no longer answers" else f"whose agent {self.lost}"
        process.lost_with = f"was lost with host {self.name}, {how}"
        self.events.put(Event("gone", process))

    def _take(self, message: dict[str, Any]) -> None:
        kind = message["type"]
        if kind == "ready":
            self.gpu_count = int(message["gpu_count"])
        elif kind == "failed":
            self.failure = str(message["why"])
        else:
            process = self._ranks[message["process"]]
            self._keep_files(process, message.get("files", {}))
            self._take_from_rank(kind, process, message)

    def _take_from_rank(self, kind: str, process: RankProcess, message: dict[str, Any]) -> None:
        if kind == "text":
            pipe = _PipeOfAgent(process, message["cell"], message["stream"])
            self.events.put(Event("text", pipe, base64.b64decode(message["data"])))
        elif kind == "gone":
            self.events.put(Event("gone", process))
        elif kind in ("started", "ended"):
            self.events.put(Event("message", process, message | {"rank": process.rank}))
        elif kind == "from" and message["message"]["type"] == "store":
            question = message["message"]
            answer = self._board.ask(question["request"])
            process.channel.send({"type": "store", "number": question["number"], "answer": answer})
        elif kind == "from":
            self.events.put(Event("message", process, message["message"]))

    def _keep_files(self, process: RankProcess, files: dict[str, str]) -> None:
        """Put a rank's files where the kernel looks for those of a rank on its own machine."""
        for name in FILES:
            if name in files:
                with contextlib.suppress(OSError):  # the folder is gone with the cluster
                    path = process.folder / f"{name} of rank {process.rank}"
                    path.write_bytes(base64.b64decode(files[name]))


class _PipeOfAgent(Pipe):
    """A pipe that the agent reads. The agent counts what was taken."""

    def take(self, size: int) -> None:
        self.rank.channel.send({"type": "taken", "cell": self.cell, "stream": self.stream, "size": size})


class _ToRank:
    """The kernel's channel to a rank: through the agent of its host."""

    def __init__(self, channel: TlsChannel, number: int):
        self._channel, self.number = channel, number

    def send(self, message: dict[str, Any], files: Sequence[int] = ()) -> None:
        self._channel.send({"type": "to", "process": self.number, "message": message})


class Hosts:
    """All hosts of a cluster, `per_host` ranks on each, in place of a `LauncherProcess`."""

    def __init__(self, hosts: list[Host], per_host: int, root: Path):
        self.hosts, self.per_host, self.root = hosts, per_host, root
        self._board = KeyBoard()

    def host_of(self, rank: int) -> Host:
        return self.hosts[rank // self.per_host]

    def start(self, config: dict[str, Any], folder: Path) -> RankProcess:
        local = {"LOCAL_RANK": str(config["rank"] % self.per_host), "LOCAL_WORLD_SIZE": str(self.per_host)}
        environment = {name: (config["environment"] | local)[name] for name in _FROM_KERNEL}
        return self.host_of(config["rank"]).start(config | {"environment": environment}, folder, self._board)

    def open_pipes(self, rank: RankProcess, cell: int) -> tuple[int, ...]:
        """None here: the agent makes them, and sends what it reads from them."""
        return ()

    def end(self, rank: RankProcess) -> None:
        if rank.status is None:
            self.host_of(rank.rank).end(rank)

    def close(self) -> None:
        """The agents end, and all that they have started."""
        for host in self.hosts:
            host.let_go()
