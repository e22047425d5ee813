"""The agent of a host: it starts ranks for a notebook on another machine, and passes on what they and it have to say.

To its launcher and its ranks the agent is what the kernel is on one machine: same pipes, same channels, same files.
When the notebook is gone the agent ends, and its launcher ends the ranks, as it does when the agent is killed.

Two threads. The main thread carries out what the kernel sends. The other, that of `Reader`, sends what the ranks say.
If network or kernel are slow, ranks that write much wait; a Stop gets through all the same.
"""

import base64
import contextlib
import ipaddress
import os
import sys
import threading
import weakref
from typing import Any

import psutil

from scratch_ddp.cells.hosts.host import FILES
from scratch_ddp.cells.hosts.tls_channel import TlsChannel
from scratch_ddp.cells.kernel.rank_process import LauncherProcess, RankProcess
from scratch_ddp.cells.kernel.reader import Event, Pipe, Reader

_OF_LAUNCHERS = ("TORCHELASTIC_", "ROLE_", "GROUP_", "MASTER_")  # torchrun's, for ranks that it starts itself


class Agent:
    """Serves the kernel at the other end of `channel`."""

    def __init__(self, channel: TlsChannel):
        self.channel = channel
        self.failure = ""
        self._ending = False
        self._processes: dict[int, RankProcess] = {}  # by the numbers that the kernel gives
        self._numbers: dict[RankProcess, int] = {}
        self._sent_files: dict[tuple[RankProcess, str], bytes] = {}
        self._pipes: weakref.WeakValueDictionary[Any, Pipe] = weakref.WeakValueDictionary()  # that have sent text
        self._lock = threading.Lock()  # for the two tables of processes
        self.launcher = LauncherProcess(Reader(self))
        self.folder = self.launcher.root / "cluster"
        self.folder.mkdir()

    def serve(self) -> None:
        """Until the kernel lets this host go. Raises EOFError if it is lost."""
        try:
            while True:
                for message in self.channel.receive():
                    if message["type"] == "let go":
                        return
                    self._carry_out(message)
        finally:
            self._ending = True
            self.launcher.close()

    # What the kernel wants

    def _carry_out(self, message: dict[str, Any]) -> None:
        number = message["process"]
        if message["type"] == "start":
            self._start(number, message["config"])
        elif message["type"] == "end":
            self.launcher.end(self._processes[number])
        elif message["type"] == "to":
            self._pass_on(self._processes[number], message["message"])

    def _start(self, number: int, config: dict[str, Any]) -> None:
        place = {"folder": str(self.folder), "directory": os.getcwd(), "path": list(sys.path), "store": "link"}
        environment = _environment(self.channel.own_address) | config["environment"]
        with self._lock:  # its first message may be read at once
            process = self.launcher.start(config | place | {"environment": environment}, self.folder)
            self._processes[number], self._numbers[process] = process, number

    def _pass_on(self, process: RankProcess, message: dict[str, Any]) -> None:
        if message["type"] == "taken":
            if pipe := self._pipes.get((process, message["cell"], message["stream"])):
                pipe.take(message["size"])
            return
        files = self.launcher.open_pipes(process, message["cell"]) if message["type"] == "execute" else ()
        process.channel.send(message, files)
        for file in files:
            os.close(file)

    # What the ranks say

    def put(self, event: Event) -> None:
        """Send an event to the kernel (the reader takes this agent for its queue of events)."""
        if event.kind == "text":
            pipe = event.source
            self._pipes[pipe.rank, pipe.cell, pipe.stream] = pipe
            data = base64.b64encode(event.value).decode()
            self._send(pipe.rank, {"type": "text", "cell": pipe.cell, "stream": pipe.stream, "data": data})
        elif isinstance(event.source, RankProcess):
            self._send_from_rank(event.source, event.kind, event.value)
        elif event.kind == "message":
            self._send_from_launcher(event.value)
        elif not self._ending:
            self.failure = f"The process that starts ranks has ended. {event.source.log()}".strip().rstrip(".")
            self.channel.send({"type": "failed", "why": self.failure})
            self.channel.shut_down()

    def _send_from_rank(self, process: RankProcess, kind: str, message: dict[str, Any] | None) -> None:
        if kind == "gone":
            self._send(process, {"type": "gone", "files": self._files(process, FILES)})
        elif message["type"] in ("state", "done"):  # the kernel compares what the ranks have called
            self._send(process, {"type": "from", "message": message, "files": self._files(process, ("calls",))})
        else:
            self._send(process, {"type": "from", "message": message})

    def _send_from_launcher(self, message: dict[str, Any]) -> None:
        if message["type"] == "launcher ready":
            self.channel.send({"type": "ready", "gpu_count": message["gpu_count"]})
        elif message["type"] == "started":
            with self._lock:
                process = [each for each in self._processes.values() if each.rank == message["rank"]][-1]
            process.pid = message["pid"]
            self._send(process, message)
        elif message["type"] == "ended":
            with self._lock:
                running = [each for each in self._processes.values() if each.status is None]
            for process in [each for each in running if each.pid == message["pid"]]:
                process.status = message["status"]
                self._send(process, message)

    def _send(self, process: RankProcess, message: dict[str, Any]) -> None:
        with self._lock:
            number = self._numbers[process]
        self.channel.send(message | {"process": number})

    def _files(self, process: RankProcess, names: tuple[str, ...]) -> dict[str, str]:
        """Those of a rank's files that have changed since they were sent."""
        files = {}
        for name in names:
            with contextlib.suppress(OSError):
                content = self._path(name, process.rank).read_bytes()
                key = process, name
                if self._sent_files.get(key) != content:
                    self._sent_files[key] = content
                    files[name] = base64.b64encode(content).decode()
        return files

    def _path(self, name: str, rank: int) -> Any:
        return self.folder / f"{name} of rank {rank}"


def _environment(address: str) -> dict[str, str]:
    """That of the ranks: the agent's, and the network interface through which it reaches the notebook."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_OF_LAUNCHERS)}
    interface = interface_of(address)
    own = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface} | kept
    return own | {"MPLBACKEND": "module://matplotlib_inline.backend_inline"}


def interface_of(address: str) -> str:
    """The name of the network interface that has an address."""
    interfaces = psutil.net_if_addrs()
    for name, addresses in interfaces.items():
        if any(each.address.split("%")[0] == address for each in addresses):
            return name
    if ipaddress.ip_address(address).is_loopback:  # 127.0.0.2 belongs to it without being listed
        return next((name for name in ("lo", "lo0") if name in interfaces), "lo")
    raise ValueError(f"no interface of this host has the address {address}")
