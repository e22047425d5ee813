"""Hosts for rank cells, all on this machine: agents with addresses 127.0.0.2 and .3, or in network namespaces."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence

import psutil

from tests import namespaces
from tests.kernel import Kernel

JOIN = (sys.executable, "-m", "scratch_ddp.cells.join", "-")


class Agent:
    """A command that joins a notebook, given the ticket on its standard input; and what it writes."""

    def __init__(self, command: Sequence[str], ticket: str):
        self._output = tempfile.TemporaryFile("w+")  # noqa: SIM115  (it lives as long as the agent)
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        with self.process.stdin as pipe:
            pipe.write(f"{ticket}\n")

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
    return [Agent([*JOIN, "--address", f"127.0.0.{2 + number}"], ticket) for number in range(count)]


def in_namespaces(ticket: str) -> list[Agent]:
    return [Agent([*namespaces.within(name), *JOIN], ticket) for name in namespaces.NAMES]


class HostsOfKernel:
    """The hosts of a kernel's cluster. `start` is called with the ticket and returns the commands that were started."""

    def __init__(self, kernel: Kernel, address: str = "127.0.0.1", start=by_hand):
        self.kernel, self.address, self.start = kernel, address, start
        self.agents: list[Agent] = []
        self.ticket = self.told = ""

    def open(self, options: str = "-n 2") -> str:
        """Begin %dist_init, up to the ticket. Returns the message id of the cell, for `Kernel.finish`."""
        cell = self.kernel.start(f"%dist_init --hosts 2 --listen {self.address} {options}")
        self.ticket = self.kernel.await_text(cell, r"join - <<< (\S+)\n")[1]
        return cell

    def init(self, options: str = "-n 2") -> None:
        cell = self.open(options)
        self.agents = self.start(self.ticket)
        result = self.kernel.finish(cell, 120)
        assert not result.error, result.traceback + "".join(str(agent.finish()) for agent in self.agents)
        self.told = result.text()

    def family(self) -> list[int]:
        return [pid for agent in self.agents for pid in agent.family()]

    def end(self) -> None:
        for agent in self.agents:
            agent.end()
