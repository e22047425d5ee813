"""The hosts of a cluster as the kernel sees them: how they are gathered, and `Hosts`, which starts ranks on them.

`Hosts` takes the place of the launcher on this machine. The keys by which ranks of several hosts find each other are
kept here as well (`KeyBoard`); the ranks' side of it is `store.py`.
"""

import base64
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

    def start(self, config: dict[str, Any], board: "KeyBoard") -> RankProcess:
        """Start a rank there. Directory, path and environment are the agent's, not the kernel's."""
        self._board = board
        number = len(self._ranks)
        process = RankProcess(config["rank"], _ToRank(self.channel, number), host=self.name)
        self._ranks[number] = process
        config = {key: config[key] for key in _SENT} | {"environment": config["environment"]}
        self.channel.send({"type": "start", "process": number, "config": config})
        if self.lost:
            self._lose(process)
        return process

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
        how = "which no longer answers" if self.lost == "no longer answers" else f"whose agent {self.lost}"
        process.ended = f"was lost with host {self.name}, {how}"
        self.events.put(Event("gone", process))

    def _take(self, message: dict[str, Any]) -> None:
        kind = message["type"]
        if kind == "agent ready":
            self.gpu_count = int(message["gpu_count"])
            return
        if kind == "failed":
            self.failure = str(message["why"])
            return
        process = self._ranks[message["process"]]
        if kind == "text":
            pipe = _PipeOfAgent(process, message["cell"])
            self.events.put(Event("text", pipe, base64.b64decode(message["data"])))
        elif kind == "gone":
            self.events.put(Event("gone", process))
        elif kind in ("started", "ended"):
            self.events.put(Event("message", process, message | {"rank": process.rank}))
        elif kind == "from" and message["message"]["type"] == "store":
            question = message["message"]
            answer = self._board.ask(question["operation"], *question["arguments"])
            process.channel.send({"type": "stored", "number": question["number"], "answer": answer})
        elif kind == "from":
            self.events.put(Event("message", process, message["message"]))


class _PipeOfAgent(Pipe):
    """A pipe that the agent reads. The agent counts what was taken."""

    def __init__(self, rank: RankProcess, cell: int):
        self.rank, self.cell = rank, cell

    def take(self, size: int) -> None:
        self.rank.channel.send({"type": "taken", "size": size})


class _ToRank:
    """The kernel's channel to a rank: through the agent of its host."""

    def __init__(self, channel: TlsChannel, number: int):
        self._channel, self._number = channel, number

    def send(self, message: dict[str, Any], files: Sequence[int] = ()) -> None:
        self._channel.send({"type": "to", "process": self._number, "message": message})

    def end(self) -> None:
        """SIGKILL for the rank."""
        self._channel.send({"type": "end", "process": self._number})


class Hosts:
    """All hosts of a cluster, `per_host` ranks on each, in place of a `LauncherProcess`."""

    def __init__(self, hosts: list[Host], per_host: int, root: Path):
        self.hosts, self.per_host, self.root = hosts, per_host, root
        self._board = KeyBoard()

    def start(self, config: dict[str, Any]) -> RankProcess:
        local = {"LOCAL_RANK": str(config["rank"] % self.per_host), "LOCAL_WORLD_SIZE": str(self.per_host)}
        environment = {name: (config["environment"] | local)[name] for name in _FROM_KERNEL}
        host = self.hosts[config["rank"] // self.per_host]
        return host.start(config | {"environment": environment}, self._board)

    def execute(self, rank: RankProcess, message: dict[str, Any]) -> None:
        """Send the message. The agent makes the pipe, and sends what it reads from it."""
        rank.channel.send(message)

    def end(self, rank: RankProcess) -> None:
        if rank.status is None:
            rank.channel.end()

    def close(self) -> None:
        """The agents end, and all that they have started."""
        for host in self.hosts:
            host.let_go()


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


# `%dist_init --hosts`


def gather(
    door: Door, count: int, limit: float, events: "queue.SimpleQueue[Event]", say: Callable[[str], None]
) -> list[Host]:
    """Wait until `count` hosts have joined and can start ranks. Closes the door. Raises ClusterError.

    The hosts are in the order of their node numbers (torchrun, srun), else of their names.
    """
    hosts: list[Host] = []
    welcomed: list[Host] = []
    until = time.monotonic() + limit
    try:
        while sum(host.ready for host in hosts) < count:
            if time.monotonic() > until:
                raise ClusterError(_who_has_come(hosts, count, limit, door))
            hosts += _arrived(door, count - len(hosts), events, say)
            for host in [host for host in hosts if host.lost]:
                hosts.remove(host)
                say(f"Host {host.name} ({host.address}) has left again. {host.failure}".rstrip())
            for host in [host for host in hosts if host.ready and host not in welcomed]:
                welcomed.append(host)
                gpus = {0: "no GPU", 1: "1 GPU"}.get(host.gpu_count, f"{host.gpu_count} GPUs")
                ready = sum(each.ready for each in welcomed)
                say(f"Host {host.name} ({host.address}, {gpus}) has joined: {ready} of {count}.")
    except BaseException as error:
        for host in hosts:
            host.let_go()
        if isinstance(error, KeyboardInterrupt):
            raise RankInterrupt(f"stopped: {sum(host.ready for host in hosts)} of {count} hosts had joined.") from None
        raise
    finally:
        door.close()
    if door.strangers:
        say(f"Turned away: {door.strangers} connections without the ticket.")
    hosts.sort(key=lambda host: (host.node is None, host.node or 0, host.name, host.address))
    for host in [host for host in hosts if [each.name for each in hosts].count(host.name) > 1]:
        host.name = f"{host.name} ({host.address})"
    return hosts


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


def describe_networks(hosts: list[Host]) -> str:
    """For ranks that did not find each other: over what each host tries."""
    listed = ", ".join(f"{host.name}: {host.address}" for host in hosts)
    return (
        f"All hosts reach this notebook; their ranks must reach each other too ({listed}). Does a firewall between "
        "them let any port through, and does GLOO_SOCKET_IFNAME, where it is set, name the right interface?"
    )


def _arrived(door: Door, wanted: int, events: "queue.SimpleQueue[Event]", say: Callable[[str], None]) -> list[Host]:
    """The next host that may join, if one comes within a moment."""
    try:
        channel, hello = door.arrivals.get(timeout=0.1)
    except queue.Empty:
        return []
    theirs = hello.get("versions", {})
    different = "; ".join(
        f"it has {name} {theirs.get(name, 'of unknown version')}, and the notebook {mine}"
        for name, mine in own_versions().items()
        if theirs.get(name) != mine
    )
    if different:
        why = f"{different}. Install the same versions on both"
        refuse(channel, why)
        say(f"Host {hello.get('name')} ({hello.get('address')}) can't join: {why}.")
    elif wanted < 1:
        refuse(channel, "as many hosts as the notebook waits for have come before this one")
    else:
        channel.send({"type": "welcome"})
        return [Host(channel, hello, events)]
    return []


def _who_has_come(hosts: list[Host], count: int, limit: float, door: Door) -> str:
    came = ", ".join(f"{host.name} ({host.address})" for host in hosts if host.ready)
    slow = ", ".join(host.name for host in hosts if not host.ready)
    text = f"{sum(host.ready for host in hosts)} of {count} hosts have joined within {limit:g} s"
    text += f": {came}." if came else "."
    if slow:
        text += f" {slow} came, but its launcher was not ready yet."
    if door.strangers:
        text += f" {door.strangers} connections did not show the ticket."
    address = f"{door.ticket.address}:{door.ticket.port}"
    return f"{text} The others must reach {address}. %dist_init prints a new ticket; --wait gives them more seconds."
