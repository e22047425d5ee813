"""A training on two hosts that loses a rank and later a whole host, in the background of a lesson.

The hosts are two agents of torchrun on this machine, at 127.0.0.2 and 127.0.0.3, with one rank each. A thread kills and
takes notes. The same training without failures, in one process, runs beside it.
"""

import json
import os
import random
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from scratch_ddp.cells.kernel.cluster import loopback
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
    "--rdzv-conf is_host={is_host},last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3 "
)
_VARIABLES = {"LIGHT_SLEEP": "0.06", "PYTHONUNBUFFERED": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
_OF_THE_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_LIMIT = 600  # seconds for the whole run
_SAYS = {  # who notices, by a piece of what is said
    "Connection closed by peer": "the other rank: its connection is closed",
    "Connection reset by peer": "the other rank: its connection is closed",
    "(exitcode: -9)": "the agent of the same host: its child has ended",
}


@dataclass
class Failure:
    """What was killed, when, after which step, and who said so after how many seconds."""

    what: str
    after_step: int
    killed_at: float
    noticed: dict[str, float] = field(default_factory=dict)


class InterruptedRun:
    """Starts at once. `wait()` until it has ended; then `plain` and `steps` are {step: its line in the step log}.

    `lines`: all lines in the order of time, also of steps that were repeated.
    """

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="scratch_ddp-lesson-16-"))
        self.failures: list[Failure] = []
        self._log, self._written, self._ended = self.folder / "hosts.log", [], False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Return when all has ended. Raises RuntimeError with what was said last if it did not."""
        self._thread.join(_LIMIT)
        if not self._ended:
            raise RuntimeError("the run did not come to its end:\n" + "\n".join(self._written[-30:]))
        self.plain, self.steps = read_steps(self.folder / "plain.log"), read_steps(self._log)
        self.lines = [json.loads(line) for line in self._log.read_text().splitlines()]

    def _run(self) -> None:
        endpoint = f"{ADDRESSES[0]}:{random.randrange(20_000, 32_000)}"  # below the ports that others get meanwhile
        agents = [_TORCHRUN.format(endpoint=endpoint, address=each, is_host=each == ADDRESSES[0]) for each in ADDRESSES]
        plain, first, second = self._start("plain", "python "), *(self._start("hosts", agent) for agent in agents)
        try:
            self._after(first, 7, "rank", lambda: psutil.Process(second.pid).children()[0].kill())
            self._after(first, 18, "host", lambda: kill_family(second.pid))
            for process in (plain, first):
                process.wait(_LIMIT)
            self._ended = True
        finally:
            for process in (plain, first, second):
                if process.poll() is None:
                    kill_family(process.pid)

    def _start(self, name: str, program: str) -> subprocess.Popen:
        """Start the training, with a step log of this name, and read what it says."""
        process = start(program + _TRAIN.format(folder=self.folder, name=name), **_VARIABLES)
        threading.Thread(target=self._read, args=(process,), daemon=True).start()
        return process

    def _after(self, first: subprocess.Popen, step: int, what: str, break_it: Callable[[], object]) -> None:
        """Break something when the hosts have made this step, of which the first keeps the rendezvous."""
        deadline = time.monotonic() + _LIMIT
        while not self._log.exists() or step not in (steps := read_steps(self._log)):
            if time.monotonic() > deadline or first.poll() is not None:
                raise TimeoutError(f"step {step} was not reached")
            time.sleep(0.01)
        self.failures.append(Failure(what, max(steps), time.time()))
        break_it()

    def _read(self, process: subprocess.Popen) -> None:
        for line in process.stdout:
            now = time.time()
            self._written.append(line.rstrip())
            for piece, who in _SAYS.items():
                if self.failures and piece in line:
                    self.failures[-1].noticed.setdefault(who, now - self.failures[-1].killed_at)


def start(command: str, **variables: str) -> subprocess.Popen:
    """Start `python …` or `torchrun …` with this Python, and not as a rank of this notebook; its output can be read."""
    module = "-m torch.distributed.run " if command.startswith("torchrun ") else ""
    own = {name: value for name, value in os.environ.items() if name not in _OF_THE_RANK}
    return subprocess.Popen(
        [sys.executable, *shlex.split(module + command.partition(" ")[2])],
        env={**own, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": loopback(), **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
