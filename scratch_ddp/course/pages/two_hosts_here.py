"""Two hosts for `%dist_init --hosts 2` on this machine: two agents, at 127.0.0.2 and 127.0.0.3.

    with two_hosts_here():
        %dist_init --hosts 2 -n 2 --listen 127.0.0.1

The command that `%dist_init` prints is run twice, as one would in a terminal on each of two machines. The page shows it
without the ticket's secret, which is used up at once. Each agent gives itself a name, `box-1` and `box-2`, since on one
machine both would have the same.
"""

import contextlib
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import TextIO

from scratch_ddp.cells import join

ADDRESSES = ("127.0.0.2", "127.0.0.3")
_COMMAND = re.compile(r"(scratch_ddp\.cells\.join - <<<) (\S+)")


@contextlib.contextmanager
def two_hosts_here() -> Iterator[None]:
    """Inside the block, start two agents as soon as a ticket is printed. If the block fails, end them."""
    agents: list[subprocess.Popen] = []
    reader = _Reader(sys.stdout, agents)
    try:
        with contextlib.redirect_stdout(reader):
            yield
    except BaseException:
        for agent in agents:
            agent.kill()
            agent.wait()
        raise


class _Reader:
    """Writes to `below`, and starts the agents once a text holds the command."""

    def __init__(self, below: TextIO, agents: list[subprocess.Popen]):
        self._below, self._agents = below, agents

    def write(self, text: str) -> int:
        if not self._agents and (found := _COMMAND.search(text)):
            self._agents += [_start(found[2], number) for number in range(len(ADDRESSES))]
        return self._below.write(_COMMAND.sub(r"\1 TICKET", text))

    def flush(self) -> None:
        self._below.flush()


def _start(ticket: str, number: int) -> subprocess.Popen:
    command = [sys.executable, "-m", __name__, f"box-{number + 1}", "-", "--address", ADDRESSES[number]]
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    agent = subprocess.Popen(command, start_new_session=True, text=True, **streams)
    with agent.stdin as pipe:
        pipe.write(f"{ticket}\n")
    return agent


if __name__ == "__main__":
    socket.gethostname = lambda name=sys.argv[1]: name
    sys.exit(join.main(sys.argv[2:]))
