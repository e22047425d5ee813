"""A training on two hosts that loses a rank and later a whole host, in the background of a lesson.

The hosts are two agents of torchrun on this machine, at 127.0.0.2 and 127.0.0.3, with one rank each. A thread kills and
takes notes. The same training without failures, in one process, runs beside it.
"""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from scratch_ddp.cells.processes import kill_family
from scratch_ddp.training.__main__ import read_steps

ADDRESSES = ("127.0.0.2", "127.0.0.3")
_TRAIN = (
    "-m scratch_ddp.course.pages.light_training --device cpu --epochs 3 --dtype float64 --lr 0.02 "
    "--strategy bucketed --every 4 --checkpoints {folder}/{name} --step-log {folder}/{name}.log"
)
_TORCHRUN = (  # host 0 keeps the rendezvous; the times are shorter than torch's own, so that a lesson need not wait
    "torchrun --nnodes 1:2 --nproc-per-node 1 --max-restarts 3 --rdzv-id lesson-16 --monitor-interval 0.1 "
    "--rdzv-backend c10d --rdzv-endpoint {endpoint} --local-addr {address} "
    "--rdzv-conf is_host={is_host},last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"
)
_PROGRAMS = {"python": (), "torchrun": ("-m", "torch.distributed.run")}
_OF_THE_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_LIMIT = 600  # seconds for the whole run
_SAYS = {  # who notices, by a piece of what is said
    "Connection closed by peer": "the other rank: its connection is closed",
    "Connection reset by peer": "the other rank: its connection is closed",
    "(exitcode: -9)": "the agent of the same host: its child has ended",
    "Timed out waiting": "the other rank: nothing came within its time limit",
}


@dataclass
class Failure:
    """What was killed, when, after which step, and who said so after how many seconds."""

    what: str
    after_step: int
    killed_at: float
    noticed: dict[str, float] = field(default_factory=dict)


class InterruptedRun:
    """Starts at once. `wait()` until it has ended; then `plain` and `steps` are {step: its line in the step log}."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="scratch_ddp-lesson-16-"))
        self.log = self.folder / "hosts.log"
        self.failures: list[Failure] = []
        self.written: list[str] = []  # by all agents and ranks
        self.error: BaseException | None = None
        self._started: list[subprocess.Popen] = []
        self._thread = threading.Thread(target=self._guarded, daemon=True)
        self._thread.start()

    def wait(self) -> "InterruptedRun":
        """Return when all has ended. Raises what went wrong."""
        self._thread.join(_LIMIT)
        if self.error or self._thread.is_alive():
            raise RuntimeError("the run did not come to its end:\n" + "\n".join(self.written[-30:])) from self.error
        self.plain, self.steps = read_steps(self.folder / "plain.log"), read_steps(self.log)
        return self

    @property
    def lines(self) -> list[dict]:
        """All lines of the step log in the order of time, also of steps that were repeated."""
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    def _guarded(self) -> None:
        plain = self.start("plain", "python")
        try:
            self.run()
            plain.wait(_LIMIT)
        except BaseException as error:
            self.error = error
        for process in self._started:
            if process.poll() is None:
                kill_family(process.pid)

    def run(self) -> None:
        """Start both hosts, end a rank and then a host."""
        endpoint = f"{ADDRESSES[0]}:{free_port()}"
        hosts = [self.start("hosts", torchrun(endpoint, address)) for address in ADDRESSES]
        self.after(7, "rank", lambda: os.kill(int((self.folder / "0.1").read_text()), signal.SIGKILL))
        self.after(18, "host", lambda: kill_family(hosts[1].pid))
        hosts[0].wait(_LIMIT)

    def start(self, name: str, program: str, options: str = "", within: Sequence[str] = ()) -> subprocess.Popen:
        """Start the training as `python` or by torchrun, with a step log of this name, and read what it says."""
        variables = {"LIGHT_SLEEP": "0.06", "PYTHONUNBUFFERED": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        variables |= {} if program == "python" else {"LIGHT_PIDS": str(self.folder)}
        process = start(f"{program} {_TRAIN.format(folder=self.folder, name=name)} {options}", variables, within)
        threading.Thread(target=self._read, args=(process,), daemon=True).start()
        self._started.append(process)
        return process

    def after(self, step: int, what: str, break_it: Callable[[], object]) -> None:
        """Break something when the hosts have made this step."""
        deadline = time.monotonic() + _LIMIT
        while not self.log.exists() or step not in read_steps(self.log):
            if time.monotonic() > deadline:
                raise TimeoutError(f"step {step} was not reached")
            time.sleep(0.01)
        self.failures.append(Failure(what, self.lines[-1]["step"], time.time()))
        break_it()

    def _read(self, process: subprocess.Popen) -> None:
        for line in process.stdout:
            now = time.time()
            self.written.append(line.rstrip())
            for piece, who in _SAYS.items():
                if self.failures and piece in line:
                    self.failures[-1].noticed.setdefault(who, now - self.failures[-1].killed_at)


def torchrun(endpoint: str, address: str) -> str:
    """The command for the host with this address; it keeps the rendezvous if the endpoint is there."""
    return _TORCHRUN.format(endpoint=endpoint, address=address, is_host=int(endpoint.startswith(f"{address}:")))


def start(command: str, variables: dict[str, str] | None = None, within: Sequence[str] = ()) -> subprocess.Popen:
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
