"""A rank: runs the cells that the kernel sends, in its main thread; a second thread obeys the kernel meanwhile."""

import contextlib
import faulthandler
import os
import queue
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from scratch_ddp.cells.channel import Link
from scratch_ddp.cells.last_call import LastCalls
from scratch_ddp.cells.rank import (
    interruptible_group as watched_group,
)
from scratch_ddp.cells.rank import (
    interruptible_work as watched_work,
)
from scratch_ddp.cells.rank import (
    output_streams,
)
from scratch_ddp.cells.rank.interruptible_work import ranks_of
from scratch_ddp.cells.rank.shell import RankShell, make_shell

_TORCH = str(Path(torch.__file__).parent)


def run_rank(link: Link, config: dict[str, Any]) -> None:
    """The whole life of a rank. Never returns."""
    pid = os.getpid()
    code = 1
    try:
        Rank(link, config).serve()
        code = 0
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        if os.getpid() == pid:
            output_streams.CellOutput.flush_c()
        os._exit(code)  # threads that hang in gloo must not keep the process


class Rank:
    """One rank of a cluster. `config`: rank, world_size, device, backend, folder, generation, environment, path, …"""

    def __init__(self, link: Link, config: dict[str, Any]):
        self.link, self.config = link, config
        self.rank, self.mark = config["rank"], config["mark"].encode()
        self.main_thread = threading.main_thread().ident
        self.pid = os.getpid()
        self.tasks: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.cell: int | None = None  # the number of the cell under way
        self.interruptible = False
        self.found = {"line": None, "waits_in": None}  # where it was when it was last asked to stop
        self.interrupted_in: dict[str, Any] | None = None  # where it was when it did
        self.shell: RankShell | None = None

    def serve(self) -> None:
        output_streams.install(output_streams.CellOutput(os.dup(1), os.dup(2), self.mark))
        signal.signal(signal.SIGINT, self._on_interrupt)
        obey = threading.Thread(target=self._obey_kernel, name="obeys-the-kernel", daemon=True)
        obey.belongs_to_no_cell = True
        obey.start()
        device = self._prepare()
        self.link.send({"type": "hello", "rank": self.rank, "pid": self.pid, "device": str(device)})
        while True:
            task = self.tasks.get()
            {"execute": self._execute, "renew": self._renew}[task["type"]](task)

    # Set-up

    def _prepare(self) -> torch.device:
        config = self.config
        os.environ.clear()
        os.environ.update(config["environment"])
        sys.path[:] = config["path"]
        os.chdir(config["directory"])
        self.last_calls = LastCalls(Path(config["folder"]), self.rank)
        self.crash = (Path(config["folder"]) / f"crash of rank {self.rank}").open("w")
        faulthandler.enable(self.crash, all_threads=False)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed()  # forks share the launcher's; each rank is to have its own
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
        gpu = config["gpu_id"]
        device = torch.device("cpu") if gpu is None else torch.device("cuda", gpu)
        if gpu is not None:
            torch.cuda.set_device(device)
        self._join_process_group(device)
        namespace = {
            "torch": torch,
            "dist": dist,
            "rank": self.rank,
            "world_size": config["world_size"],
            "gpu_id": gpu,
            "device": device,
        }
        self.shell = make_shell(namespace, self._send_display)
        self.shell.on_failure = self._end_of_learners_code
        return device

    def _join_process_group(self, device: torch.device) -> None:
        """A file as rendezvous: it opens no port, unlike torch's TCPStore, which listens on every interface."""
        config = self.config
        path = Path(config["folder"]) / f"rendezvous {config['meeting']}"
        if config["backend"] == watched_group.BACKEND:
            watched_group.observers.append(self.last_calls.note)
            store = dist.FileStore(str(path), config["world_size"])
            watched_group.join(store, self.rank, config["world_size"], config["generation"])
        else:
            dist.init_process_group(
                config["backend"],
                store=dist.FileStore(f"{path} {config['generation']}", config["world_size"]),
                rank=self.rank,
                world_size=config["world_size"],
                device_id=device if config["backend"] == "nccl" else None,
            )

    # Cells

    def _execute(self, task: dict[str, Any]) -> None:
        output_streams.begin_cell(output_streams.CellOutput(*task["files"], self.mark, task["cell"]))
        self.last_calls.forget()
        signal.signal(signal.SIGINT, self._on_interrupt)
        self.shell.execution_count = task["number"]
        self.shell.failure = None
        self.cell, self.interrupted_in = task["cell"], None
        error = self._run(task["code"])
        self.cell = None
        if os.getpid() != self.pid:  # the cell forked, and this is the child: it is no rank
            if error is not None:
                print("\n".join(self.shell.failure or [repr(error)]), file=sys.stderr)
            os._exit(0 if error is None else 1)
        for name in output_streams.restore_streams():
            print(f"(sys.{name} had been replaced; it is the rank's own again)", file=sys.stderr)
        output_streams.CellOutput.flush_c()
        done = {"type": "done", "cell": task["cell"], "error": self._describe(error)}
        self.link.send(done | {"interrupted_in": self.interrupted_in})

    def _run(self, code: str) -> BaseException | None:
        try:
            try:
                self.interruptible = True
                result = self.shell.run_cell(code, store_history=True, silent=False)
                return result.error_before_exec or result.error_in_exec
            finally:
                self.interruptible = False
        except BaseException as raised:  # an interrupt that fell outside of the learner's code, even on the way out
            self.interruptible = False
            return raised

    def _end_of_learners_code(self) -> bool:
        """What follows is ours: an interrupt that comes now would only hide what happened. Whether one has come."""
        self.interruptible = False
        return self.interrupted_in is not None

    def _describe(self, error: BaseException | None) -> dict[str, Any] | None:
        if error is None:
            return None
        text = "\n".join(self.shell.failure or [])
        places = [*sys.path, Path(__file__).parents[3]]  # an editable install is not on the path
        for folder in sorted({str(Path(place).resolve()) for place in places}, key=len, reverse=True):
            text = text.replace(f"{folder}/", "")  # a file's name in its package says more, and is the same everywhere
        lines = text.split("\n")
        value = f"{error.msg} (line {error.lineno})" if isinstance(error, SyntaxError) else str(error)
        return {"name": type(error).__name__, "value": value, "traceback": lines}

    def _send_display(self, display: dict[str, Any]) -> None:
        text = display["data"].get("text/plain")
        if text is not None and len(display["data"]) == 1:
            print(text)  # plain text is shown as what a rank prints
            return
        if output_streams.is_forked():  # it has no link of its own, and shall not write into the rank's
            print(text if text is not None else f"<{', '.join(display['data'])}>")
            return
        output = output_streams.current_output()
        self.link.send({"type": "display", "cell": output.cell, "place": output.place_display(), **display})

    def _renew(self, task: dict[str, Any]) -> None:
        """Put fresh process groups in place of those that an interrupt has left in doubt."""
        try:
            if not dist.is_initialized():
                retired = []  # the learner has destroyed it: nothing is in doubt
            elif self.config["backend"] != watched_group.BACKEND:
                retired = self._start_over(task["generation"])
            else:
                retired = watched_group.renew_groups(task["timeout"], task["generation"])
            self.link.send({"type": "renewed", "retired": retired})
        except BaseException as error:
            self.link.send({"type": "renewed", "error": f"{type(error).__name__}: {error}"})

    def _start_over(self, generation: int) -> list[str]:
        """Plain gloo and NCCL: a new default group; groups and meshes made before are lost."""
        self.config["generation"] = generation
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
        self._join_process_group(self.shell.user_ns["device"])
        return ["all but the default group"]

    # The second thread

    def _obey_kernel(self) -> None:
        try:
            while True:
                for message in self.link.receive():
                    self._obey(message)
        except (EOFError, OSError):
            os.killpg(0, signal.SIGKILL)  # the kernel is gone, and so are this rank and what it has started

    def _obey(self, message: dict[str, Any]) -> None:
        kind = message["type"]
        if kind == "execute":
            self.tasks.put(message | {"files": self.link.take_files(2)})
        elif kind == "renew":
            self.tasks.put(message)
        elif kind == "interrupt" and message["cell"] == self.cell:
            self.found = self._whereabouts(message["cell"])
            signal.pthread_kill(self.main_thread, signal.SIGINT)  # seen as soon as the main thread is back from C++
            watched_work.free_waiting_futures()
        elif kind == "where":
            stopping = self.cell == message["cell"] and not self.interruptible
            where = self._whereabouts(message["cell"]) | {"stopping": stopping}
            self.link.send({"type": "whereabouts", "cell": message["cell"], **where})

    def _on_interrupt(self, *_: Any) -> None:
        if self.interruptible:
            self.interrupted_in = self.interrupted_in or self.found
            raise KeyboardInterrupt

    def _whereabouts(self, cell: int) -> dict[str, Any]:
        """The line of the cell that the main thread is in, and the operation that it waits in, if it does."""
        if cell != self.cell:
            return {"line": None, "waits_in": None}
        waits_in = watched_work.waiting_in()
        line, called, in_torch = None, None, False
        frame = innermost = sys._current_frames().get(self.main_thread)
        while frame is not None and line is None:
            file = frame.f_code.co_filename
            if file in self.shell.compile._filename_map:
                line = frame.f_lineno
            elif file == dist.distributed_c10d.__file__:
                called = frame.f_code.co_name  # the outermost is what the learner called: all_gather_object
            frame = frame.f_back
        in_torch = innermost.f_code.co_filename.startswith(_TORCH)
        if waits_in is None and in_torch:
            waits_in = watched_work.awaited_in_native_code()
        if waits_in:
            waits_in = waits_in | {"called": called, "ranks": ranks_of(waits_in["group"])}
        return {"line": line, "waits_in": waits_in}
