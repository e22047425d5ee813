"""`run_ranks`: run a function on n real ranks, for benchmarks and tests, and return what each rank returned.

The ranks are forked, so the function may be a closure, and the caller must not have used CUDA or many threads before.
Nothing outlives the call: ranks that have not answered after `timeout` seconds are killed and named.
"""

import contextlib
import datetime
import io
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

import torch
import torch.distributed as dist


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
    capture: bool = False,
    rendezvous: str = "file",
    waits: float | None = None,
) -> list[Any]:
    """Call `function(*args)` on `world_size` ranks of one process group and return [rank 0's result, rank 1's, …].

    Results are pickled, including tensors. With `capture`, each entry is (result, what the rank printed).
    `rendezvous`: the ranks find each other through a "file" or through "tcp" on loopback. With the backend nccl, each
    rank uses the GPU of its number. `waits`: seconds that a collective waits for other ranks (default: `timeout`).
    Raises RankFailed, naming every rank that raised, died or did not answer within `timeout` seconds.
    """
    if rendezvous not in ("file", "tcp"):
        raise ValueError(f"rendezvous must be 'file' or 'tcp', not {rendezvous!r}")
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        # torch's own server would listen on every address of this machine.
        listener = socket.create_server(("127.0.0.1", 0)) if rendezvous == "tcp" else None
        meet = listener or f"{folder}/rendezvous"
        started = []
        for rank in range(world_size):
            here, there = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank_main,
                args=(rank, world_size, function, args, backend, waits or timeout, meet, there, capture),
            )
            process.start()
            there.close()
            started.append((process, here))
        if listener:
            listener.close()  # rank 0 has its own copy
        try:
            results = _collect(started, time.monotonic() + timeout)
            for process, _ in started:
                process.join(5)  # they wait for one another; killing one would make the others report errors
            return results
        finally:
            for process, here in started:
                if process.is_alive():
                    os.killpg(process.pid, signal.SIGKILL)
                process.join()
                here.close()


def _collect(started: list, deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    waiting = {here: rank for rank, (_, here) in enumerate(started)}
    while waiting and (left := deadline - time.monotonic()) > 0:
        for here in wait(list(waiting), timeout=left):
            rank = waiting.pop(here)
            try:
                ok, value = pickle.loads(
                    here.recv_bytes()
                )  # torch's own pickler would share memory with an ended process
                (results if ok else failures)[rank] = value
            except EOFError:
                process = started[rank][0]
                process.join()
                failures[rank] = f"died with exit code {process.exitcode}"
        if failures:  # the others may wait for a failed rank: give them a few seconds, not the whole timeout
            deadline = min(deadline, time.monotonic() + 5)
    for rank in waiting.values():
        failures[rank] = "did not answer in time"
    if failures:
        raise RankFailed(failures)
    return [results[rank] for rank in range(len(started))]


def _store(meet: str | socket.socket, rank: int, world_size: int) -> dist.Store:
    """Where the ranks meet: a file of that name, or rank 0, which serves the socket."""
    if isinstance(meet, str):
        return dist.FileStore(meet, world_size)
    port = meet.getsockname()[1]
    if rank == 0:
        return dist.TCPStore("127.0.0.1", port, world_size, is_master=True, master_listen_fd=meet.detach())
    meet.close()
    return dist.TCPStore("127.0.0.1", port, world_size)


def _rank_main(rank, world_size, function, args, backend, waits, meet, there, capture) -> None:
    os.setsid()  # so that processes started by the rank can be killed with it
    # Loopback alone, and no variables about ranks from the calling process.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    printed = io.StringIO()
    try:
        store, limit = _store(meet, rank, world_size), datetime.timedelta(seconds=waits)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit)
        with contextlib.redirect_stdout(printed) if capture else contextlib.nullcontext():
            result = function(*args)
        there.send_bytes(pickle.dumps((True, (result, printed.getvalue()) if capture else result)))
    except BaseException:
        there.send_bytes(pickle.dumps((False, traceback.format_exc())))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        there.close()
        # Peers may still read from this rank's sockets: exit when all have finished, or after two seconds. Rank 0 exits
        # last, since over TCP it serves the store.
        with contextlib.suppress(Exception):
            store = dist.distributed_c10d._get_default_store()
            for state, waits in (("finished", True), ("leaves", rank == 0)):
                store.set(f"{state}/{rank}", "1")
                if waits:
                    store.wait([f"{state}/{peer}" for peer in range(world_size)], datetime.timedelta(seconds=2))
        os._exit(0)
