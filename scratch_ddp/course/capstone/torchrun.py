"""Runs a program of ours under torchrun for a limited time, and ends all that it has started."""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from scratch_ddp.cells.processes import die_with_parent, kill_family
from scratch_ddp.course.capstone.places import LOST, OTHERS

RANKS = 2
STUCK = "stuck"  # the file that a watchdog leaves is STUCK.rank
LIMIT = 240  # seconds for a run, whatever it does


class Ended:
    """How a run ended: its exit status (None: it was ended after LIMIT seconds), where ranks waited, its last lines."""

    def __init__(self, status: int | None, stuck: dict[int, str], printed: list[str]):
        self.status, self.stuck, self.printed = status, stuck, printed

    @property
    def complaint(self) -> str:
        """What went wrong, or ""."""
        if self.stuck:
            return "; ".join(f"rank {rank} {words}" for rank, words in sorted(self.stuck.items()))
        if self.status is None:
            return f"it had not ended after {LIMIT} seconds"
        if self.status:
            errors = [line for line in self.printed if "Error" in line and "elastic" not in line]
            errors.sort(key=lambda line: any(words in line for words in LOST))  # a cause before what follows from it
            return f"it ended with status {self.status}: {(errors or self.printed or ['it printed nothing'])[0][:300]}"
        return ""


def run(module: str, folder: Path, *arguments: object, restarts: int = 0) -> Ended:
    """Run a module on RANKS ranks of this machine. `folder`: for the watchdogs' files."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={RANKS}", f"--max-restarts={restarts}"]
    command += [
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=127.0.0.1:0",
        "--local-addr=127.0.0.1",
        "--monitor-interval=0.1",
    ]
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    variables = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": loopback, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [*command, "-m", module, *map(str, arguments)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | variables,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        try:
            status = _wait(process, folder)
        finally:
            kill_family(process.pid)
            process.wait()
        output.seek(0)
        lines = [line.removeprefix("[rank0]:").removeprefix("[rank1]:").strip() for line in output]
    return Ended(status, _stuck(folder), lines)


def _wait(process: subprocess.Popen, folder: Path) -> int | None:
    deadline = time.monotonic() + LIMIT
    while process.poll() is None and time.monotonic() < deadline:
        if 0 < len(_stuck(folder)) < RANKS:
            deadline = min(deadline, time.monotonic() + OTHERS)
        elif _stuck(folder):
            break
        time.sleep(0.05)
    return process.poll()


def _stuck(folder: Path) -> dict[int, str]:
    return {int(file.name.split(".")[1]): file.read_text() for file in folder.glob(f"{STUCK}.*")}
