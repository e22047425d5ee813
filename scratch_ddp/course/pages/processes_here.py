"""Commands such as `torchrun … train.py`, started from a rank cell on this machine."""

import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence

_OF_THE_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_PROGRAMS = {"python": (), "torchrun": ("-m", "torch.distributed.run")}


def start(command: str, variables: Mapping[str, str] | None = None, within: Sequence[str] = ()) -> subprocess.Popen:
    """Start `python …` or `torchrun …` with this Python, and not as a rank of this notebook; its output can be read.

    `within`: a command that runs another one, in a network namespace.
    """
    program, *arguments = shlex.split(command)
    own = {name: value for name, value in os.environ.items() if name not in _OF_THE_RANK}
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    return subprocess.Popen(
        [*within, sys.executable, *_PROGRAMS[program], *arguments],
        env=own | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": loopback, **(variables or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def free_port() -> int:
    """A port at which nobody listens now."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]
