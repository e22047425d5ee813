"""The process that starts ranks, reports their deaths, and ends them when the kernel is gone.

It imports torch once, and the modules that SCRATCH_DDP_PRELOAD names. Every rank is a fork of it, so a cluster starts
in a fraction of a second. Forking is safe because the launcher never runs a learner's code, starts no thread and never
touches a GPU. Where forking after an import is not safe (macOS), each rank is a fresh Python that imports torch itself.

The ranks are its children. The number of a child is not reused before the launcher has collected its exit status, so
a signal never reaches a process of anybody else. A launcher that dies takes its ranks with it.
"""

import contextlib
import gc
import importlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

from scratch_ddp.cells import processes
from scratch_ddp.cells.channel import Channel
from scratch_ddp.cells.flight_recorder import read_records

_LOOK_EVERY = 0.1  # seconds: whether the kernel is there, and whether a child has ended


def main(descriptor: str, kernel: str, folder: str) -> None:
    """Serve the kernel (process `kernel`) at the other end of the socket `descriptor` until it is gone.

    `folder` holds the files that the ranks share. It is deleted at the end.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    processes.become_subreaper()
    try:
        channel = Channel(socket.socket(fileno=int(descriptor)))
        signal.signal(signal.SIGTERM, lambda *_: leave(folder))
        processes.die_with_parent(signal.SIGTERM)  # while the import takes seconds, nobody looks for the kernel
        if os.getppid() != int(kernel):
            leave(folder)
        if can_fork():
            gc.disable()
            import scratch_ddp.cells.rank.worker  # noqa: F401  (with torch and IPython: what every rank needs)

            for module in os.environ.get("SCRATCH_DDP_PRELOAD", "").split():
                importlib.import_module(module)
            gc.freeze()  # or each rank's collections would go through all of torch, and copy it
            gc.enable()
        gpu_count = count_gpus()
        processes.die_with_parent(0)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        channel.send({"type": "launcher ready", "gpu_count": gpu_count})
        Launcher(channel, int(kernel)).serve()
        leave(folder)
    except BaseException:
        traceback.print_exc()  # into the folder's log, which the kernel shows
        sys.stderr.flush()
    finally:
        os._exit(0)


def leave(folder: str) -> None:
    """Delete the folder and end this process, without the usual exit, which takes a while once torch is imported."""
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def count_gpus() -> int:
    """How many GPUs torch can use. A child process counts them: a process that has touched CUDA can't be forked."""
    if sys.platform != "linux":
        return 0
    import torch

    if torch.version.cuda is None and torch.version.hip is None:
        return 0
    if not can_fork():
        return torch.cuda.device_count()
    if (child := os.fork()) == 0:
        os._exit(torch.cuda.device_count())
    return max(0, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def can_fork() -> bool:
    """Whether ranks are forks of the launcher; SCRATCH_DDP_START=spawn makes each a fresh Python everywhere."""
    return sys.platform == "linux" and os.environ.get("SCRATCH_DDP_START") != "spawn"


class Launcher:
    """Starts ranks on request and reports how they end."""

    def __init__(self, channel: Channel, kernel: int):
        self.channel, self.kernel = channel, kernel
        self.ranks: dict[int, dict[str, Any]] = {}  # process number → the rank's configuration
        self._spawned: list[subprocess.Popen] = []

    def serve(self) -> None:
        try:
            while os.getppid() == self.kernel:
                if select.select([self.channel], [], [], _LOOK_EVERY)[0]:
                    for message in self.channel.receive():
                        self.handle(message)
                self.collect()
        except (EOFError, OSError):
            pass  # the kernel has closed its end, or is gone
        finally:
            self.end_all()

    def handle(self, message: dict[str, Any]) -> None:
        if message["type"] == "start":
            files = self.channel.take_files(2)
            pid = self._fork(message, files) if can_fork() else self._spawn(message, files)
            for file in files:
                os.close(file)
            self.ranks[pid] = message["config"]
        elif message["type"] == "end":
            for pid in [pid for pid, config in self.ranks.items() if config["process"] == message["process"]]:
                processes.kill_family(pid)

    def _fork(self, message: dict[str, Any], files: list[int]) -> int:
        pid = os.fork()
        if pid:
            return pid
        try:
            self.channel.close()
            become_rank(message["config"], *files)
        finally:
            os._exit(1)

    def _spawn(self, message: dict[str, Any], files: list[int]) -> int:
        """A fresh Python. Its configuration goes to its standard input: everybody can see a process's arguments."""
        command = "import sys; from scratch_ddp.cells.launcher import spawned; spawned(*map(int, sys.argv[1:]))"
        arguments = [sys.executable, "-P", "-c", command, *map(str, files)]
        environment = message["config"]["environment"] | {"PYTHONPATH": os.environ["PYTHONPATH"]}
        process = subprocess.Popen(arguments, stdin=subprocess.PIPE, pass_fds=files, env=environment)
        self._spawned.append(process)  # kept, or Python would collect its exit status
        with process.stdin as pipe:
            pipe.write(json.dumps(message["config"]).encode())
        return process.pid

    def collect(self) -> None:
        """Report the ranks that have ended, and end what they have left behind."""
        ranks_ended = False
        with contextlib.suppress(ChildProcessError):  # no children
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = ended
                if pid in self.ranks:
                    ranks_ended = True
                    config = self.ranks.pop(pid)
                    processes.kill_group(pid)
                    ended = {"process": config["process"], "status": os.waitstatus_to_exitcode(status)}
                    self.channel.send({"type": "ended", **ended, **last_words(config)})
        if ranks_ended:
            processes.kill_orphans(self.ranks)

    def end_all(self) -> None:
        for pid in self.ranks:
            processes.kill_family(pid)
        processes.kill_descendants()


def last_words(config: dict[str, Any]) -> dict[str, Any]:
    """What a rank has left in its files: where it has crashed, and what it had called."""
    folder, rank = Path(config["folder"]), config["rank"]
    found: dict[str, Any] = {"crash": "", "calls": []}
    with contextlib.suppress(OSError, ValueError):  # the folder is gone; or it died as it was writing
        found["crash"] = (folder / f"crash of rank {rank}").read_text(errors="replace")
        found["calls"] = read_records(folder, rank)
    return found


def spawned(*files: int) -> None:
    """The main function of a rank that is a fresh Python."""
    for file in files:
        os.set_inheritable(file, False)
    become_rank(json.load(sys.stdin), *files)


def become_rank(config: dict[str, Any], sock: int, out: int) -> None:
    """Turn this new process into a rank: a session of its own, output to the kernel, no standard input."""
    os.setsid()
    processes.die_with_parent()
    os.dup2(out, 1)
    os.dup2(out, 2)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    for file in (out, null):
        os.close(file)
    del sys.argv[1:]  # they are the launcher's; so a pasted script's `parse_args()` finds none
    from scratch_ddp.cells.rank.worker import run_rank

    run_rank(Channel(socket.socket(fileno=sock)), config)
