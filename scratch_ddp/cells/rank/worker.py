"""A rank: its main thread runs the cells that the kernel sends; a second thread reads the kernel's messages."""

import contextlib
import faulthandler
import functools
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from scratch_ddp.cells.channel import Channel
from scratch_ddp.cells.flight_recorder import FlightRecorder
from scratch_ddp.cells.hosts.store import LinkStore
from scratch_ddp.cells.rank import interruptible_group, output_streams
from scratch_ddp.cells.rank.output_streams import CellPipe
from scratch_ddp.cells.rank.shell import RankShell, answer, make_shell
from scratch_ddp.cells.rank.stop import ANSWERS, Interrupts

_WIDGET = "application/vnd.jupyter.widget-view+json"
_HAS_ITS_GROUP = "(a rank has its process group already, and keeps it: {} does nothing here)"


def run_rank(channel: Channel, config: dict[str, Any]) -> None:
    """The whole life of a rank. Never returns."""
    pid = os.getpid()
    code = 1
    try:
        Rank(channel, config).serve()
        code = 0
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        if os.getpid() == pid:
            CellPipe.flush_c()
        os._exit(code)  # threads that hang in gloo must not keep the process


class Rank:
    """One rank of a cluster. `config` is made in `kernel/cluster.py`."""

    def __init__(self, channel: Channel, config: dict[str, Any]):
        self.channel, self.config = channel, config
        self.rank, self.mark = config["rank"], config["mark"].encode()
        self.pid = os.getpid()
        self.tasks: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.shell: RankShell | None = None
        self.link_store: LinkStore | None = None  # if the ranks run on several hosts

    def serve(self) -> None:
        output_streams.install(CellPipe(os.dup(1), self.mark))
        self.interrupts = Interrupts(lambda: self.shell.compile._filename_map, self._send_whole)
        reader = threading.Thread(target=self._read_kernel, name="reads-from-kernel", daemon=True)
        reader.belongs_to_no_cell = True
        reader.start()
        self._prepare()
        self.channel.send({"type": "ready", "device": str(self.device), "pid": self.pid})
        while True:
            task = self.tasks.get()
            {"execute": self._execute, "renew": self._renew}[task["type"]](task)

    # Set-up

    def _prepare(self) -> None:
        config = self.config
        os.environ.clear()
        os.environ.update(config["environment"] | {"MPLBACKEND": "module://matplotlib_inline.backend_inline"})
        sys.path[:] = config["path"]
        os.chdir(config["directory"])
        peers = [rank for rank in range(config["world_size"]) if rank != self.rank]
        self.recorder = FlightRecorder(Path(config["folder"]), self.rank, peers)
        self.crash = (Path(config["folder"]) / f"crash of rank {self.rank}").open("w")
        faulthandler.enable(self.crash, all_threads=False)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed()  # all forks have the launcher's; each rank needs its own
        threads = os.environ.get("OMP_NUM_THREADS") or "1"
        torch.set_num_threads(int(threads.split(",")[0]))  # OpenMP's list has a number for each level of nesting
        gpu = config["gpu_id"]
        self.device = torch.device("cpu") if gpu is None else torch.device("cuda", gpu)
        if gpu is not None:
            torch.cuda.set_device(self.device)
        self._join_process_group()
        namespace = {
            "torch": torch,
            "dist": dist,
            "rank": self.rank,
            "world_size": config["world_size"],
            "gpu_id": gpu,
            "device": self.device,
        }
        self.shell = make_shell(namespace, self._send_display)
        self.shell.on_failure = self.interrupts.end_of_learners_code
        adapt_process_group()

    def _join_process_group(self) -> None:
        """The ranks find each other through a store, and join the default group."""
        config = self.config
        if config["backend"] == interruptible_group.BACKEND:
            interruptible_group.observers.append(self.recorder.record)
            interruptible_group.join(self._store("rendezvous"), self.rank, config["world_size"], config["generation"])
        else:
            distributed_c10d.init_process_group(
                config["backend"],
                store=self._store(f"rendezvous {config['generation']}"),
                rank=self.rank,
                world_size=config["world_size"],
                device_id=self.device if config["backend"] == "nccl" else None,
            )

    def _store(self, meeting: str) -> dist.Store:
        """Where ranks meet: a file, or with several hosts keys in the kernel. (TCPStore listens on every network.)"""
        if self.config.get("store") == "link":
            self.link_store = self.link_store or LinkStore(self.channel)
            return dist.PrefixStore(meeting, self.link_store)
        return dist.FileStore(str(Path(self.config["folder"]) / meeting), self.config["world_size"])

    # Cells

    def _execute(self, task: dict[str, Any]) -> None:
        if task["files"]:  # else no descriptor is free: the output comes late
            output_streams.begin_cell(CellPipe(*task["files"], self.mark))
        signal.signal(signal.SIGINT, self.interrupts.on_signal)
        self.shell.execution_count = task["number"]
        self.shell.failure = None
        self.interrupts.begin(task["cell"])
        self.recorder.cell = task["cell"]
        result, error = self._run(lambda: self.shell.run_cell(task["code"], store_history=True, silent=False))
        error = error or result.error_before_exec or result.error_in_exec
        interrupted = self.interrupts.end_of_learners_code(error)
        if interrupted:
            interruptible_group.give_up()
        self.interrupts.cell = None
        if os.getpid() != self.pid:  # the cell has forked, and this is the child: it is no rank
            if error is not None:
                print("\n".join(self.shell.failure or [repr(error)]), file=sys.stderr)
            os._exit(0 if error is None else 1)
        if error is None and self.shell.failure:  # of a display, or of what %%capture has run: any kernel shows it
            print("\n".join(self.shell.failure), file=sys.stderr)
        CellPipe.flush_c()
        done = {"type": "done", "cell": task["cell"], "error": self._describe(error)}
        where = self.interrupts.interrupted_in if interrupted else None
        done |= {"interrupted_in": where, "calls": self.recorder.calls(), **interruptible_group.open_calls()}
        self.channel.send(done)

    def _run(self, task: Callable[[], Any]) -> tuple[Any, BaseException | None]:
        """What the learner's code returns, or what it raises; interrupts are raised in it."""
        try:
            try:
                self.interrupts.interruptible = True
                return task(), None
            finally:
                self.interrupts.interruptible = False
        except BaseException as raised:  # an interrupt outside of the learner's code, even at the end of `finally`
            self.interrupts.interruptible = False
            return None, raised

    def _describe(self, error: BaseException | None) -> dict[str, Any] | None:
        if error is None:
            return None
        text = "\n".join(self.shell.failure or [])
        places = [*filter(os.path.isabs, sys.path), Path(__file__).parents[3]]  # an editable install is not on the path
        with contextlib.suppress(FileNotFoundError):  # a cell may have deleted the folder that it is in
            places.append(Path.cwd())
        for folder in sorted({str(Path(place).resolve()) for place in places}, key=len, reverse=True):
            text = text.replace(f"{folder}/", "")  # a file's name in its package says more, and is the same everywhere
        lines = text.split("\n")
        value = f"{error.msg} (line {error.lineno})" if isinstance(error, SyntaxError) else str(error)
        return {"name": type(error).__name__, "value": value, "traceback": lines}

    def _send_display(self, display: dict[str, Any]) -> None:
        if display["data"].pop(_WIDGET, None) and not display["data"]:
            return  # the frontend could not reach a rank's widget, so its text is shown
        if list(display["data"]) == ["text/plain"]:
            print(display["data"]["text/plain"])  # plain text is shown as what a rank prints
        else:
            output_streams.current_pipe().display(display)

    def _send_whole(self, message: dict[str, Any]) -> None:
        with output_streams.uninterrupted():
            self.channel.send(message)

    def _answer(self, question: dict[str, Any]) -> None:
        found = {}
        with contextlib.suppress(Exception):  # of a learner's __repr__, say
            if question["kind"] == "calls":
                found = interruptible_group.open_calls(patience=0.2)
            else:
                found = answer(self.shell, question)
        self.channel.send({"type": "answer", "number": question["number"], "found": found})

    # Process groups after an interrupt

    def _renew(self, task: dict[str, Any]) -> None:
        """Put fresh process groups in place of those that an interrupt has left in doubt.

        Over plain gloo and NCCL that is a new default group; groups and meshes made before are lost.
        """
        try:
            if self.config["backend"] != interruptible_group.BACKEND:
                self.config["generation"] = task["generation"]
                with contextlib.suppress(Exception):
                    distributed_c10d.destroy_process_group()
                self._join_process_group()
                retired = ["all but the default group"]
            else:
                retired = interruptible_group.renew_groups(task["timeout"], task["generation"])
            self.channel.send({"type": "renewed", "retired": retired})
        except BaseException as error:
            self.channel.send({"type": "renewed", "error": f"{type(error).__name__}: {error}"})

    # The second thread

    def _read_kernel(self) -> None:
        try:
            while True:
                for message in self.channel.receive():
                    try:
                        self._handle(message)
                    except Exception:  # the next message may be a Stop
                        traceback.print_exc()
        finally:
            os.killpg(0, signal.SIGKILL)  # the kernel is gone, and so are this rank and what it has started

    def _handle(self, message: dict[str, Any]) -> None:
        kind = message["type"]
        if kind == "execute":
            self.tasks.put(message | {"files": self.channel.take_files(1)})
        elif kind == "renew":
            self.tasks.put(message)
        elif kind == "ask":  # in a thread of its own: a __repr__ may take long
            thread = threading.Thread(target=self._answer, args=(message,), name=ANSWERS, daemon=True)
            thread.belongs_to_no_cell = True
            thread.start()
        elif kind == "stored":
            self.link_store.take(message)
        elif kind == "hold" and message["cell"] == self.interrupts.cell:
            self.interrupts.hold(message["until"])
        elif kind == "interrupt" and message["cell"] == self.interrupts.cell:
            self.interrupts.interrupt(message["number"], message["together"], message["end"])
        if kind == "query_state" or (kind == "interrupt" and not message["end"]):  # the kernel waits for all answers
            state = {"type": "state", "cell": message["cell"], "calls": self.recorder.calls()}
            self.channel.send(state | self.interrupts.state(message["cell"]) | interruptible_group.open_calls())


def adapt_process_group() -> None:
    """Let calls that would make or destroy the default process group do nothing but say so, and compare new groups.

    So a script for torchrun runs in a cell, pasted or by %dist_run. And torch numbers groups by counting: ranks that
    have counted differently would wait for each other for ever.
    """
    destroy, new_group = dist.destroy_process_group, dist.distributed_c10d._new_group_with_tag

    @functools.wraps(dist.init_process_group)
    def init_process_group(*_: Any, **__: Any) -> None:
        print(_HAS_ITS_GROUP.format("init_process_group"), file=sys.stderr)

    @functools.wraps(destroy)
    def destroy_process_group(group: dist.ProcessGroup | None = None) -> None:
        if group in (None, dist.group.WORLD):
            print(_HAS_ITS_GROUP.format("destroy_process_group"), file=sys.stderr)
        else:
            destroy(group)

    def new_group_with_tag(ranks: list[int] | None = None, *args: Any, **kwargs: Any) -> dist.ProcessGroup:
        if not kwargs.get("use_local_synchronization"):
            interruptible_group.announce_new_group(ranks)
        return new_group(ranks, *args, **kwargs)

    dist.init_process_group, dist.destroy_process_group = init_process_group, destroy_process_group
    dist.distributed_c10d._new_group_with_tag = new_group_with_tag  # what `new_group` is for all kinds of groups
