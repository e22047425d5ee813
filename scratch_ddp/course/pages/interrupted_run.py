"""A training on two hosts that loses a rank and later a whole host, in the background of a lesson.

The hosts are two agents of torchrun on this machine, at 127.0.0.2 and 127.0.0.3, with one rank each. A thread kills and
takes notes. The same training without failures, in one process, runs beside it.
"""

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from scratch_ddp.course.pages.processes_here import free_port, start
from scratch_ddp.training.step_log import read_steps

ADDRESSES = ("127.0.0.2", "127.0.0.3")
KILL_RANK_AFTER, KILL_HOST_AFTER = 7, 18  # steps
_TRAIN = (
    "-m scratch_ddp.course.pages.light_training --device cpu --epochs 3 --dtype float64 --lr 0.02 "
    "--strategy bucketed --every 4 --checkpoints {folder}/{name} --step-log {folder}/{name}.log"
)
_TORCHRUN = (  # host 0 keeps the rendezvous; the times are shorter than torch's own, so that a lesson need not wait
    "--nnodes 1:2 --nproc-per-node 1 --max-restarts 3 --rdzv-id lesson-16 --monitor-interval 0.1 "
    "--rdzv-backend c10d --rdzv-endpoint {endpoint} --local-addr {address} "
    "--rdzv-conf is_host={is_host},last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"
)
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
        self.failures: list[Failure] = []
        self.written: list[tuple[float, str]] = []  # (when, line) of all agents and ranks
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def wait(self) -> "InterruptedRun":
        """Return when all has ended. Raises what went wrong."""
        self._thread.join(_LIMIT)
        if self.error or self._thread.is_alive():
            said = "\n".join(line for _, line in self.written[-30:])
            raise RuntimeError(f"the run did not come to its end:\n{said}") from self.error
        self.plain, self.steps = (read_steps(self.folder / name) for name in ("plain.log", "hosts.log"))
        return self

    @property
    def lines(self) -> list[dict]:
        """All lines of the step log in the order of time, also of steps that were repeated."""
        return _lines(self.folder / "hosts.log")

    def _run(self) -> None:
        plain = self._start("plain", "")
        endpoint = f"{ADDRESSES[0]}:{free_port()}"
        hosts = [self._start("hosts", torchrun_options(endpoint, address)) for address in ADDRESSES]
        try:
            self._after("rank", KILL_RANK_AFTER, lambda: _end(int((self.folder / "0.1").read_text())))
            self._after("host", KILL_HOST_AFTER, lambda: [_end(pid) for pid in _family(hosts[1].pid)])
            for process in (plain, hosts[0]):
                process.wait(_LIMIT)
        except BaseException as error:
            self.error = error
        finally:
            for process in (plain, *hosts):
                for pid in _family(process.pid) if process.poll() is None else ():
                    _end(pid)

    def _start(self, name: str, torchrun: str, options: str = "", within: Sequence[str] = ()) -> subprocess.Popen:
        variables = {"LIGHT_SLEEP": "0.06", "PYTHONUNBUFFERED": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        variables |= {"LIGHT_PIDS": str(self.folder)} if torchrun else {}
        program = f"torchrun {torchrun}" if torchrun else "python"
        process = start(f"{program} {_TRAIN.format(folder=self.folder, name=name)} {options}", variables, within)
        threading.Thread(target=self._read, args=(process,), daemon=True).start()
        return process

    def _read(self, process: subprocess.Popen) -> None:
        for line in process.stdout:
            now = time.time()
            self.written.append((now, line.rstrip()))
            for piece, who in _SAYS.items():
                if self.failures and piece in line:
                    self.failures[-1].noticed.setdefault(who, now - self.failures[-1].killed_at)

    def _after(self, what: str, step: int, break_it: Callable[[], object]) -> None:
        log, deadline = self.folder / "hosts.log", time.monotonic() + _LIMIT
        while not log.exists() or step not in read_steps(log):
            if time.monotonic() > deadline:
                raise TimeoutError(f"step {step} was not reached")
            time.sleep(0.01)
        self.failures.append(Failure(what, _lines(log)[-1]["step"], time.time()))
        break_it()


def torchrun_options(endpoint: str, address: str) -> str:
    """For the host with this address; it keeps the rendezvous if the endpoint is there."""
    return _TORCHRUN.format(endpoint=endpoint, address=address, is_host=int(endpoint.startswith(f"{address}:")))


def _family(pid: int) -> list[int]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    return []


def _end(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _lines(log: Path) -> list[dict]:
    return [json.loads(line) for line in log.read_text().splitlines()]
