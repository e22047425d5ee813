"""The process that starts ranks, learns of their ends, and ends them when the kernel is gone.

It imports torch once; every rank is a fork of it, so a cluster starts in a fraction of a second. It never runs a
learner's code, starts no thread and never touches a GPU, which is what makes forking it safe. Where forking after an
import is not safe (macOS), each rank is a fresh Python that imports torch itself.

The ranks are its children: no other process can take one's number until the launcher has collected its exit status,
so a signal never reaches a stranger. One that dies takes its ranks with it.
"""

import contextlib
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from typing import Any

from scratch_ddp.cells.channel import Link
from scratch_ddp.cells.processes import (
    adopt_orphans,
    die_with_parent,
    end_children,
    end_family,
    end_group,
    end_orphans,
)

_LOOK_FOR_KERNEL = 0.25  # seconds between two looks whether the kernel still lives


def main(descriptor: str, kernel: str, folder: str) -> None:
    """Serve the kernel (process `kernel`) at the other end of the socket `descriptor` until it is gone.

    `folder` holds what the ranks share (rendezvous files); it goes with the launcher.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    adopt_orphans()
    try:
        link = Link(socket.socket(fileno=int(descriptor)))
        if can_fork():
            import scratch_ddp.cells.rank.worker  # noqa: F401  (with torch and IPython: what every rank needs)
        with contextlib.suppress(OSError):
            link.send({"type": "launcher ready", "gpu_count": count_gpus()})
        Launcher(link, int(kernel)).serve()
        shutil.rmtree(folder, ignore_errors=True)
    except BaseException:
        traceback.print_exc()  # into the folder's log, which the kernel shows
        sys.stderr.flush()
    finally:
        os._exit(0)  # an orderly end of a process that has imported torch takes a while


def count_gpus() -> int:
    """How many GPUs torch can use: asked in a child, since a process that has touched CUDA can't be forked."""
    if not sys.platform.startswith("linux"):
        return 0
    command = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
    if "torch" in sys.modules:
        import torch

        if torch.version.cuda is None and torch.version.hip is None:
            return 0
        read_end, write_end = os.pipe()
        if os.fork() == 0:
            os.write(write_end, str(torch.cuda.device_count()).encode())
            os._exit(0)
        os.close(write_end)
        with open(read_end) as pipe:
            count = pipe.read()
        os.wait()
        return int(count or 0)
    return int(subprocess.run(command, capture_output=True, text=True).stdout or 0)


def can_fork() -> bool:
    """Whether ranks are forks of the launcher; SCRATCH_DDP_START=spawn makes each a fresh Python everywhere."""
    return sys.platform == "linux" and os.environ.get("SCRATCH_DDP_START") != "spawn"


class Launcher:
    """Starts ranks on request and reports how they end."""

    def __init__(self, link: Link, kernel: int):
        self.link, self.kernel = link, kernel
        self.children: set[int] = set()
        self.wake, wakened = socket.socketpair()
        self.wake.setblocking(False)
        wakened.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wakened.fileno(), warn_on_full_buffer=False)
        self._wakened = wakened  # kept open

    def serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self.link, selectors.EVENT_READ)
            selector.register(self.wake, selectors.EVENT_READ)
            try:
                while os.getppid() == self.kernel:
                    for key, _ in selector.select(_LOOK_FOR_KERNEL):
                        if key.fileobj is self.wake:
                            self.wake.recv(4096)
                        else:
                            for message in self.link.receive():
                                self.obey(message)
                    self.collect()
            except (EOFError, OSError):
                pass  # the kernel has closed its end, or is gone
            finally:
                self.end_all()

    def obey(self, message: dict[str, Any]) -> None:
        if message["type"] == "start":
            files = self.link.take_files(3)
            pid = self._fork(message, files) if can_fork() else self._spawn(message, files)
            for file in files:
                os.close(file)
            self.children.add(pid)
            self.link.send({"type": "started", "rank": message["config"]["rank"], "pid": pid})
        elif message["type"] == "end" and message["pid"] in self.children:
            end_family(message["pid"])

    def _fork(self, message: dict[str, Any], files: list[int]) -> int:
        pid = os.fork()
        if pid:
            return pid
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self.link.close()
            self.wake.close()
            self._wakened.close()
            become_rank(message["config"], *files)
        finally:
            os._exit(1)

    def _spawn(self, message: dict[str, Any], files: list[int]) -> int:
        """A fresh Python. It reads its configuration from a file, since anybody may see a process's arguments."""
        command = "import sys; from scratch_ddp.cells.launcher import spawned; spawned(*map(int, sys.argv[1:]))"
        with tempfile.TemporaryFile() as config:
            config.write(json.dumps(message["config"]).encode())
            config.flush()
            handed = [config.fileno(), *files]
            for file in handed:
                os.set_inheritable(file, True)
            arguments = [sys.executable, "-c", command, *map(str, handed)]
            environment = message["config"]["environment"] | {"PYTHONPATH": os.environ["PYTHONPATH"]}
            return os.posix_spawn(sys.executable, arguments, environment)

    def collect(self) -> None:
        """Report the ranks that have ended, and end what they have left behind."""
        ranks_ended = False
        with contextlib.suppress(ChildProcessError):  # no children
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = ended
                if pid in self.children:
                    ranks_ended = True
                    self.children.discard(pid)
                    end_group(pid)
                    self.link.send({"type": "ended", "pid": pid, "status": os.waitstatus_to_exitcode(status)})
        if ranks_ended:
            end_orphans(self.children)

    def end_all(self) -> None:
        for pid in self.children:
            end_family(pid)
        end_children()


def spawned(config: int, *files: int) -> None:
    """The main function of a rank that is a fresh Python."""
    with open(config, "rb") as file:
        file.seek(0)
        message = json.load(file)
    for descriptor in files:
        os.set_inheritable(descriptor, False)
    become_rank(message, *files)


def become_rank(config: dict[str, Any], sock: int, out: int, err: int) -> None:
    """Turn this fresh process into a rank: its own session, its output to the kernel, no standard input."""
    os.setsid()
    die_with_parent()
    os.dup2(out, 1)
    os.dup2(err, 2)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    for file in (out, err, null):
        os.close(file)
    from scratch_ddp.cells.rank.worker import run_rank

    run_rank(Link(socket.socket(fileno=sock)), config)
