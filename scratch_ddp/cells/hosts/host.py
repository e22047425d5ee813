"""The hosts of a cluster as the kernel sees them: how they are gathered, and `Hosts`, which starts ranks on them.

`Hosts` takes the place of the launcher on this machine. The keys by which ranks of several hosts find each other are
kept here as well (`KeyBoard`); the ranks' side of it is `store.py`.
"""

import base64
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from scratch_ddp.cells.hosts.door import Door, own_versions, refuse
from scratch_ddp.cells.hosts.tls_channel import TlsChannel
from scratch_ddp.cells.kernel.placement import INTERRUPTIBLE, Placement, place
from scratch_ddp.cells.kernel.rank_process import RankProcess
from scratch_ddp.cells.kernel.reader import Event, Pipe
from scratch_ddp.cells.words import ClusterError, RankInterrupt, name_ranks

_FROM_KERNEL = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


class KeyBoard:
    """Keys and their values (text) for the ranks' stores, as a TCPStore's server keeps them. Nothing waits here."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._lock = threading.Lock()  # requests come through several threads

    def ask(self, operation: str, keys: list[str], value: Any = None) -> list[str | None]:
        """Set the keys to a value, or "add" to their numbers. Returns the values, None for a key that is not there."""
        with self._lock:
            if operation == "add":
                value = str(int(self._values.get(keys[0], "0")) + value)
            if operation != "get":
                self._values |= dict.fromkeys(keys, value)
            return [self._values.get(key) for key in keys]


class Host:
    """A host whose agent has entered: to its ranks what a `LauncherProcess` is to those of this machine.

    Its messages arrive in a thread of its own, and become `events`.
    """

    def __init__(self, channel: TlsChannel, hello: dict[str, Any], board: KeyBoard, events: "queue.SimpleQueue[Event]"):
        self.channel, self.board, self.events = channel, board, events
        self.name: str = hello["name"]
        self.address: str = hello["address"]
        self.node: int | None = hello["node"]
        self.gpu_count: int = hello["gpu_count"]
        self.lost = False
        self._ranks: list[RankProcess] = []
        threading.Thread(target=self._read, name="reads-from-host", daemon=True).start()

    def start(self, config: dict[str, Any]) -> RankProcess:
        """Start a rank there. Directory, path and the rest of the environment are the agent's, not the kernel's."""
        number = len(self._ranks)
        rank = RankProcess(config["rank"], _ToRank(self.channel, number), self, number)
        self._ranks.append(rank)
        self.channel.send({"type": "start", "config": config | {"process": number}})
        if self.lost:
            self._lose(rank)
        return rank

    def execute(self, rank: RankProcess, message: dict[str, Any]) -> None:
        """Send the message. The agent makes the pipe, and sends what it reads from it."""
        rank.channel.send(message)

    def end(self, rank: RankProcess) -> None:
        """SIGKILL for a rank."""
        if rank.status is None:
            self.channel.send({"type": "end", "process": rank.number})

    def close(self) -> None:
        """The agent ends its ranks and itself."""
        self.channel.send({"type": "let go"})
        self.channel.end_sending()

    def note_taken(self, size: int) -> None:
        """So much text has been taken: the agent may read as much again."""
        self.channel.send({"type": "taken", "size": size})

    # In the thread

    def _read(self) -> None:
        with contextlib.suppress(EOFError, KeyError, TypeError, ValueError, AttributeError):
            while True:
                for message in self.channel.receive():
                    self._take(message)
        self.lost = True
        self.channel.shut_down()
        self.channel.close()
        for rank in list(self._ranks):
            self._lose(rank)

    def _lose(self, rank: RankProcess) -> None:
        rank.ended = f"was lost with host {self.name}"
        self.events.put(Event("gone", rank))

    def _take(self, message: dict[str, Any]) -> None:
        kind, number = message["type"], message["process"]
        source = self if number is None else self._ranks[number]
        if kind == "text":
            pipe = Pipe(source, message["cell"], self)
            self.events.put(Event("text", pipe, base64.b64decode(message["data"])))
        elif kind == "gone":
            self.events.put(Event("gone", source))
        elif message["message"]["type"] == "store":
            question = message["message"]
            answer = self.board.ask(question["operation"], *question["arguments"])
            source.channel.send({"type": "stored", "number": question["number"], "answer": answer})
        else:
            self.events.put(Event("message", source, message["message"]))


class _ToRank:
    """The kernel's channel to a rank: through the agent of its host."""

    def __init__(self, channel: TlsChannel, number: int):
        self._channel, self._number = channel, number

    def send(self, message: dict[str, Any], files: Sequence[int] = ()) -> None:
        self._channel.send({"type": "to", "process": self._number, "message": message})


class Hosts:
    """All hosts of a cluster, `per_host` ranks on each, in place of a `LauncherProcess`."""

    def __init__(self, hosts: list[Host], per_host: int, root: Path):
        self.hosts, self.per_host, self.root = hosts, per_host, root

    def start(self, config: dict[str, Any]) -> RankProcess:
        local = {"LOCAL_RANK": str(config["rank"] % self.per_host), "LOCAL_WORLD_SIZE": str(self.per_host)}
        environment = {name: (config["environment"] | local)[name] for name in _FROM_KERNEL}
        return self.hosts[config["rank"] // self.per_host].start(config | {"environment": environment})

    def close(self) -> None:
        """The agents end, and all that they have started."""
        for host in self.hosts:
            host.close()


# `%dist_init --hosts`


def gather(
    door: Door, count: int, limit: float, events: "queue.SimpleQueue[Event]", say: Callable[[str], None]
) -> list[Host]:
    """Wait until `count` hosts have joined. Closes the door. Raises ClusterError.

    The hosts are in the order of their node numbers (torchrun, srun), else of their names.
    """
    hosts: list[Host] = []
    board, until = KeyBoard(), time.monotonic() + limit
    try:
        while len(hosts) < count:
            if time.monotonic() > until:
                raise ClusterError(_who_has_come(hosts, count, limit, door))
            with contextlib.suppress(queue.Empty):
                channel, hello = door.arrivals.get(timeout=0.1)
                name = f"{hello['name']} ({hello['address']}"
                if different := _differences(hello["versions"]):
                    refuse(channel, different)
                    say(f"Host {name}) can't join: {different}.")
                    continue
                channel.send({"type": "welcome"})
                hosts.append(Host(channel, hello, board, events))
                gpus = {0: "no GPU", 1: "1 GPU"}.get(hello["gpu_count"], f"{hello['gpu_count']} GPUs")
                say(f"Host {name}, {gpus}) has joined: {len(hosts)} of {count}.")
            for host in [host for host in hosts if host.lost]:
                hosts.remove(host)
                say(f"Host {host.name} has left again.")
    except BaseException as error:
        for host in hosts:
            host.close()
        if isinstance(error, KeyboardInterrupt):
            raise RankInterrupt(f"stopped: {len(hosts)} of {count} hosts had joined.") from None
        raise
    finally:
        door.close()
    if door.strangers:
        say(f"Turned away: {door.strangers} connections without the ticket.")
    hosts.sort(key=lambda host: (host.node is None, host.node or 0, host.name, host.address))
    for host in [host for host in hosts if [each.name for each in hosts].count(host.name) > 1]:
        host.name = f"{host.name} ({host.address})"
    return hosts


def _differences(versions: dict[str, str]) -> str:
    """In which versions a host differs from this one, and what to do."""
    found = [
        f"it has {name} {versions.get(name)}, and the notebook {mine}"
        for name, mine in own_versions().items()
        if versions.get(name) != mine
    ]
    return f"{'; '.join(found)}. Install the same versions on both" if found else ""


def _who_has_come(hosts: list[Host], count: int, limit: float, door: Door) -> str:
    came = ", ".join(f"{host.name} ({host.address})" for host in hosts) or "none"
    return (
        f"{len(hosts)} of {count} hosts have joined within {limit:g} s: {came}. {door.strangers} connections did not "
        f"show the ticket. The others must reach {door.ticket.address}:{door.ticket.port}. %dist_init prints a new "
        "ticket; --wait gives them more seconds."
    )


def place_ranks(hosts: list[Host], per_host: int, options: Any) -> Placement:
    """Choose GPUs on each host from those that it has. Raises ClusterError."""
    placements = []
    for host in hosts:
        try:
            placements.append(place(per_host, host.gpu_count, options.gpu_ids, options.device, options.backend))
        except ClusterError as error:
            raise ClusterError(f"host {host.name}: {error}") from None
    # One backend serves all: NCCL only if every rank of every host has a GPU to itself.
    backends = {placement.backend for placement in placements}
    backend = backends.pop() if len(backends) == 1 else INTERRUPTIBLE
    parts = []
    for number, (host, placement) in enumerate(zip(hosts, placements, strict=True)):
        ranks = name_ranks(range(number * per_host, (number + 1) * per_host))
        where = "CPU" if placement.gpus[0] is None else "GPU " + ", ".join(map(str, dict.fromkeys(placement.gpus)))
        parts.append(f"{ranks} on {host.name}, {where}")
    why = f"over {'nccl' if backend == 'nccl' else 'gloo'}: {'; '.join(parts)}"
    return Placement(backend, [gpu for placement in placements for gpu in placement.gpus], why)
