"""`run_ranks`: run a function on n real ranks, for benchmarks and tests, and return what each rank returned.

The ranks are forked, so the function may be a closure, and the caller must not have used CUDA or many threads before.
Nothing outlives the call: ranks that have not answered after `timeout` seconds are killed and named.
"""

import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing import start_processes

_STAY = 2.0  # seconds at most that a rank stays once it has answered: others may still read from its sockets
_PATIENCE = 3.0  # seconds for the others once a rank has failed: they may wait for it in vain


class RankFailed(RuntimeError):
    """At least one rank raised, died or did not answer. `failures` maps each such rank to its report."""

    def __init__(self, failures: dict[int, str]):
        self.failures = failures
        super().__init__("\n".join(f"rank {rank}: {report}" for rank, report in sorted(failures.items())))


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    backend: str = "gloo",
    timeout: float = 60.0,
    waits: float | None = None,
) -> list[Any]:
    """Call `function(*args)` on `world_size` ranks of one process group and return [rank 0's result, rank 1's, …].

    Results are pickled. `waits`: seconds that a collective waits for other ranks (default: `timeout`). Raises
    RankFailed, naming every rank that raised, died or did not answer within `timeout` seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        own = (world_size, function, args, backend, waits or timeout, Path(folder))
        ranks = start_processes(_rank_main, own, world_size, join=False, start_method="fork").processes
        deadline = time.monotonic() + timeout
        while (alive := [rank.sentinel for rank in ranks if rank.is_alive()]) and time.monotonic() < deadline:
            wait(alive, timeout=deadline - time.monotonic())
            if any(rank.exitcode for rank in ranks):
                deadline = min(deadline, time.monotonic() + _PATIENCE)
        late = [rank for rank in ranks if rank.is_alive()]
        for rank in late:
            os.killpg(rank.pid, signal.SIGKILL)
        answers = [_answer(rank, rank in late, Path(folder, f"{number}.answer")) for number, rank in enumerate(ranks)]
    if failures := {rank: value for rank, (ok, value) in enumerate(answers) if not ok}:
        raise RankFailed(failures)
    return [value for _, value in answers]


def _answer(process: BaseProcess, late: bool, path: Path) -> tuple[bool, Any]:
    process.join()
    if path.exists():
        return pickle.loads(path.read_bytes())
    return False, "did not answer in time" if late else f"died with exit code {process.exitcode}"


def _rank_main(rank, world_size, function, args, backend, waits, folder: Path) -> None:
    os.setsid()  # so that processes started by the rank can be killed with it
    # Loopback alone, and no variables about ranks from the calling process.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    torch.set_num_threads(1)
    try:
        store, limit = dist.FileStore(f"{folder}/rendezvous", world_size), timedelta(seconds=waits)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit)
        answer, failed = pickle.dumps((True, function(*args))), False
    except BaseException:
        answer, failed = pickle.dumps((False, traceback.format_exc())), True
    Path(folder, f"{rank}.partial").write_bytes(answer)
    Path(folder, f"{rank}.partial").rename(Path(folder, f"{rank}.answer"))
    sys.stdout.flush()
    sys.stderr.flush()
    leaves = time.monotonic() + _STAY
    while len(list(folder.glob("*.answer"))) < world_size and time.monotonic() < leaves:
        time.sleep(0.005)
    os._exit(failed)
