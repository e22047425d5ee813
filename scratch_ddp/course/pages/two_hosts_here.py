"""Two hosts for `%dist_init --hosts 2` on this machine: two agents, at 127.0.0.2 and 127.0.0.3.

    with two_hosts_here():
        %dist_init --hosts 2 -n 2 --listen 127.0.0.1

The command that `%dist_init` prints is run twice, as one would on two machines, and shown without the ticket, which is
used up at once. The agents give themselves the names `box-1` and `box-2`: on one machine both would have the same.
"""

import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

ADDRESSES = ("127.0.0.2", "127.0.0.3")
_COMMAND = re.compile(r"(scratch_ddp\.cells\.join - <<<) (\S+)")
_AGENT = (  # not a function here: with this package it would import torch, which an agent does not need
    "import socket, sys; from scratch_ddp.cells import join; name = sys.argv[1]; socket.gethostname = lambda: name; "
    "sys.exit(join.main(sys.argv[2:]))"
)


@contextlib.contextmanager
def two_hosts_here() -> Iterator[None]:
    """Inside the block, start two agents as soon as a ticket is printed."""
    page = sys.stdout

    def write(text: str) -> int:
        if found := _COMMAND.search(text):
            for number, address in enumerate(ADDRESSES, start=1):
                command = [sys.executable, "-c", _AGENT, f"box-{number}", "-", "--address", address]
                quiet = dict.fromkeys(("stdout", "stderr"), subprocess.DEVNULL)
                agent = subprocess.Popen(command, start_new_session=True, text=True, stdin=subprocess.PIPE, **quiet)
                with agent.stdin as pipe:
                    pipe.write(f"{found[2]}\n")
        return page.write(_COMMAND.sub(r"\1 TICKET", text))

    with contextlib.redirect_stdout(SimpleNamespace(write=write, flush=page.flush)):
        yield
