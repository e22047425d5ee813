"""Hosts for rank cells, all on this machine: agents with addresses 127.0.0.2 and .3, or in network namespaces."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from scratch_ddp.benchmark.rank_cells.kernel import Kernel, Result

JOIN = (sys.executable, "-m", "scratch_ddp.cells.join")
NAMESPACES = (f"scratch-ddp-{os.getpid()}-a", f"scratch-ddp-{os.getpid()}-b")  # two runs do not meet
ADDRESSES = ("10.77.0.1", "10.77.0.2")


class Agent:
    """A command that joins a notebook, and what it writes."""

    def __init__(self, command: Sequence[str], env: dict[str, str] | None = None):
        self._output = tempfile.TemporaryFile("w+")  # noqa: SIM115  (it lives as long as the agent)
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            env=os.environ | (env or {}),
            start_new_session=True,
        )

    def family(self) -> list[int]:
        """The process ids of the command and of all that it has started."""
        process = psutil.Process(self.process.pid)
        return [process.pid, *(child.pid for child in process.children(recursive=True))]

    def agent(self) -> int:
        """The process id of the agent, which the command may have started."""
        return next(pid for pid in self.family() if "scratch_ddp.cells.join" in psutil.Process(pid).cmdline()[:4])

    def finish(self, limit: float = 10) -> tuple[int, str]:
        """Wait for its end. Returns its exit status and what it has written."""
        status = self.process.wait(limit)
        self._output.seek(0)
        return status, self._output.read()

    def end(self) -> None:
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def by_hand(ticket: str, count: int = 2) -> list[Agent]:
    """One agent for each of the addresses 127.0.0.2, …"""
    return [Agent([*JOIN, ticket, "--address", f"127.0.0.{2 + number}"]) for number in range(count)]


def in_namespaces(ticket: str) -> list[Agent]:
    return [Agent([*within(name), *JOIN, ticket]) for name in NAMESPACES]


class HostsOfKernel:
    """The hosts of a kernel's cluster. `start` is called with the ticket and returns the commands that were started."""

    def __init__(self, kernel: Kernel, address: str = "127.0.0.1", start=by_hand):
        self.kernel, self.address, self.start = kernel, address, start
        self.agents: list[Agent] = []
        self.ticket = ""

    def open(self, options: str = "-n 2") -> str:
        """Begin %dist_init, up to the ticket. Returns the message id of the cell, for `Kernel.finish`."""
        cell = self.kernel.start(f"%dist_init --hosts 2 --listen {self.address} {options}")
        self.ticket = self.kernel.await_text(cell, r"join (\S+)\n")[1]
        return cell

    def init(self, options: str = "-n 2") -> Result:
        cell = self.open(options)
        self.agents = self.start(self.ticket)
        result = self.kernel.finish(cell, 120)
        assert not result.error, result.traceback + "".join(str(agent.finish()) for agent in self.agents)
        return result

    def family(self) -> list[int]:
        return [pid for agent in self.agents for pid in agent.family()]

    def end(self) -> None:
        for agent in self.agents:
            agent.end()


# Network namespaces: two hosts with a cable between them


def missing_for_namespaces() -> str:
    """Why there can be no namespaces here; empty if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if not shutil.which("ip"):
        return "network namespaces need the command ip (iproute2)"
    name = f"{NAMESPACES[0]}-probe"
    probe = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if probe.returncode:
        return f"no network namespaces here: {probe.stderr.strip()}"
    _ip("netns", "del", name)
    return ""


def within(namespace: str) -> list[str]:
    """A command that runs another one in a namespace."""
    return ["ip", "netns", "exec", namespace]


@contextlib.contextmanager
def two_namespaces() -> Iterator[None]:
    """Two hosts, 10.77.0.1 and 10.77.0.2, with a cable between them, and connected to nothing else."""
    _remove_namespaces()
    try:
        for name in NAMESPACES:
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        first, second = NAMESPACES
        _ip("-n", first, "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", second)
        for name, address in zip(NAMESPACES, ADDRESSES, strict=True):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "cable")
            _ip("-n", name, "link", "set", "cable", "up")
        yield
    finally:
        _remove_namespaces()


def plug(state: str) -> None:
    """ "down" pulls the cable of the second host, "up" plugs it in again."""
    _ip("-n", NAMESPACES[1], "link", "set", "cable", state)


def processes_in(namespace: str) -> list[int]:
    found = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=True)
    return [int(pid) for pid in found.stdout.split()]


def _remove_namespaces() -> None:
    for name in NAMESPACES:
        if Path("/run/netns", name).exists():
            for pid in processes_in(name):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            _ip("netns", "del", name)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def wait_until_empty(namespace: str, limit: float) -> float:
    """The seconds until no process is left in a namespace. Raises AssertionError after `limit` seconds."""
    began = time.monotonic()
    while left := processes_in(namespace):
        assert time.monotonic() - began < limit, f"still there after {limit} s: {left}"
        time.sleep(0.02)
    return time.monotonic() - began
