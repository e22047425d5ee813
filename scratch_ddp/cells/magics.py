"""nbdistributed's magics with these rank cells behind them (same names, same options; see `%dist_init?`).

A plain cell becomes the magic `%%distributed` before IPython runs it (`PlainCells`), so every cell for ranks comes
through `RankMagics`.
"""

import atexit
import contextlib
import functools
import queue
import re
from argparse import ArgumentTypeError
from collections.abc import Callable
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring
from nbdistributed.magic import DistributedMagic

from scratch_ddp.cells.hosts.door import open_door
from scratch_ddp.cells.hosts.host import Hosts, gather, place_ranks
from scratch_ddp.cells.kernel.cluster import Cluster, LauncherProcess
from scratch_ddp.cells.kernel.execution import Execution
from scratch_ddp.cells.kernel.output import NotebookOutput
from scratch_ddp.cells.kernel.placement import INTERRUPTIBLE, Placement, place
from scratch_ddp.cells.kernel.reader import Event, Reader
from scratch_ddp.cells.kernel.stop import stop_button
from scratch_ddp.cells.words import ClusterError, name_ranks, parse_cell_line

_NO_CLUSTER = "no ranks are running. %dist_init -n 4 starts four."
_PATIENCE = 1.0  # seconds that an editor's question may take


def _number(text: str) -> int:
    """What argparse takes for an option's number."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text}: write a whole number, at least 1")
    return int(text)


class RankMagics(DistributedMagic):
    """The magics. Not decorated by @magics_class: that would empty nbdistributed's table, whose names lead here."""

    def __init__(self, shell: Any):
        super().__init__(shell)
        self.cluster: Cluster | None = None
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.reader = Reader(self.events)
        self.launcher = LauncherProcess(self.reader)
        self.automatic = False  # whether plain cells run on every rank
        self.cells: dict[int, int] = {}  # our number of a cell → the notebook's
        atexit.register(self.close)
        self.plain_cells = PlainCells(shell, lambda: self.automatic and not self._silent())
        if getattr(shell, "kernel", None) is not None:
            self._end_with_kernel(shell.kernel)
            answer_from_rank_0(shell.kernel, self._ask)
        shell.register_magic_function(self.dist_run)  # nbdistributed has no such name

    # Clusters

    @magic_arguments()
    @argument("--num-processes", "-n", type=_number, default=2, help="how many ranks")
    @argument("--master-addr", "-a", choices=("localhost", "127.0.0.1"), help="this machine, in any case")
    @argument("--gpu-ids", "-g", help="GPUs to use, such as 0,1: rank 0 gets the first of the list")
    @argument("--backend", choices=(INTERRUPTIBLE, "gloo", "nccl"), help="by default the first, or nccl on GPUs")
    @argument("--device", choices=("cpu", "cuda"), help="by default GPUs where there are any")
    @argument("--hosts", type=_number, help="how many hosts join, each with -n ranks; needs --listen")
    @argument("--listen", help="the address of this machine where they join, such as 10.0.0.5 or 10.0.0.5:7000")
    @argument("--wait", type=_number, default=300, help="seconds in which all hosts must have joined (default: 300)")
    def dist_init(self, line: str) -> None:
        """Start ranks. Afterwards plain cells run on all of them."""
        options = _options(self.dist_init, line)
        if self.cluster is not None:
            self.cluster.catch_up()
            if not self.cluster.dead:
                raise ClusterError(
                    f"{self.cluster.world_size} ranks are running already. %dist_shutdown ends them; then start anew."
                )
            self._end_cluster()
        if not self.launcher.alive:
            self.launcher.close()
            self.launcher = LauncherProcess(self.reader)
        if options.hosts is not None or options.listen is not None:
            self._start_on_hosts(options)
            return
        gpu_count = self.launcher.await_ready(self.events)
        world_size = options.num_processes
        placement = place(world_size, gpu_count, options.gpu_ids, options.device, options.backend)
        self._start(self.launcher, placement)
        print(f"{name_ranks(range(world_size)).capitalize()} ready, {placement.why}.")

    def _start_on_hosts(self, options: Any) -> None:
        if options.hosts is None or options.listen is None:
            raise ClusterError(
                "ranks on other machines need both: how many, and where they join. Write for example "
                "%dist_init --hosts 2 -n 2 --listen 10.0.0.5"
            )
        count, per_host = options.hosts, options.num_processes
        door = open_door(options.listen)
        print(f"Run this on each host:\n    python -m scratch_ddp.cells.join - <<< {door.ticket}", flush=True)
        hosts = gather(door, count, options.wait, self.events, say=functools.partial(print, flush=True))
        launcher = Hosts(hosts, per_host, self.launcher.root)
        try:
            placement = place_ranks(hosts, per_host, options)
            self._start(launcher, placement)
        finally:
            if self.cluster is None:
                launcher.close()
        print(f"{name_ranks(range(count * per_host)).capitalize()} ready, {placement.why}.")

    def _start(self, launcher: LauncherProcess | Hosts, placement: Placement) -> None:
        with stop_button(self.events):
            self.cluster = Cluster(launcher, self.events, placement)
        self.automatic = True

    def dist_shutdown(self, line: str = "") -> None:
        """End the ranks and all that they have started, whatever state they are in. Works even if there are none."""
        if self.cluster is None:
            print("No ranks are running.")
            return
        self.cluster.catch_up()
        NotebookOutput(attended=False).note_late(self.cluster.late, self.cells)
        count = self.cluster.world_size
        self._end_cluster()
        print(f"{name_ranks(range(count)).capitalize()} ended.")

    dist_reset = dist_shutdown

    def _end_cluster(self) -> None:
        cluster, self.cluster, self.automatic = self.cluster, None, False
        cluster.shut_down()
        if cluster.launcher is not self.launcher:
            cluster.launcher.close()

    def _end_with_kernel(self, kernel: Any) -> None:
        """End the ranks when the kernel is told to end, which may take it seconds."""
        shut_down = kernel.do_shutdown

        def end(restart: bool) -> Any:
            self.close()
            return shut_down(restart)

        kernel.do_shutdown = end

    def close(self) -> None:
        """The kernel ends: so does everything that was started from it."""
        if self.cluster is not None and self.cluster.launcher is not self.launcher:
            self.cluster.launcher.close()
        self.launcher.close()

    # Cells

    def _silent(self) -> bool:
        """Whether the request is none of a person's: editors look at the kernel's variables in this way."""
        parent = self.shell.get_parent() if hasattr(self.shell, "get_parent") else {}
        return bool(parent.get("content", {}).get("silent"))

    def distributed(self, line: str, cell: str) -> None:
        """Run the cell on every rank."""
        self._need_cluster()
        self._run(f"[0-{self.cluster.world_size - 1}] {line}", cell)

    def rank(self, line: str, cell: str) -> None:
        """Run the cell on some ranks: %%rank [0], %%rank [0,2], %%rank [0-2]."""
        self._need_cluster()
        self._run(line, cell)

    def sync(self, line: str = "") -> None:
        """A barrier: returns when every rank has reached it."""
        self.distributed("", "dist.barrier()")

    def _need_cluster(self) -> None:
        if self.cluster is None:
            raise ClusterError(_NO_CLUSTER)
        self.cluster.catch_up()
        if self.cluster.dead:
            how = "; ".join(self.cluster.dead.values())
            raise ClusterError(f"{how}. The cluster can't go on: %dist_init starts a new one.")

    def _run(self, line: str, code: str) -> None:
        ranks, stop_after = parse_cell_line(line, self.cluster.world_size)
        cell = len(self.cells) + 1
        # Some versions of IPython add 1 to the number in brackets when a cell begins, others when it has ended.
        self.cells[cell] = number = len(self.shell.history_manager.input_hist_parsed) - 1
        kernel = getattr(self.shell, "kernel", None)  # which knows whether a person sits in front of it
        notebook = NotebookOutput(attended=bool(getattr(kernel, "_allow_stdin", False)))
        notebook.note_late(self.cluster.late, self.cells)
        execution = Execution(self.cluster, ranks, code, cell, number, notebook)
        try:
            execution.run(stop_after)
        finally:
            notebook.note_late(self.cluster.late, self.cells)

    def dist_run(self, line: str) -> None:
        """%dist_run train.py --lr 0.1: run a script for torchrun on every rank, in their process group.

        As after %run, the script's variables are the ranks' then; but `rank`, `device` and the like stay as they were.
        """
        self.distributed("", f"get_ipython().run_script({line!r})")

    def _ask(self, code: str, question: dict[str, Any]) -> dict[str, Any]:
        """A question of the editor's about a cell. Only what ranks would run. (Jupyter asks between cells.)"""
        with contextlib.suppress(Exception):  # then the kernel answers
            if self.cluster is not None and self.plain_cells.for_ranks(code):
                self.cluster.catch_up()
                return self.cluster.ask([0], {"code": code, **question}, _PATIENCE).get(0, {})
        return {}

    # Information and settings

    def dist_status(self, line: str = "") -> None:
        """A line for each rank: its process, where it runs, whether it lives."""
        if self.cluster is None:
            print("No ranks are running.")
            return
        self.cluster.catch_up()
        for rank in self.cluster.ranks:
            state = "ready" if rank.alive else self.cluster.dead[rank.rank].split(" ", 2)[2]
            where = f"   on {rank.launcher.name}" if rank.launcher.name else ""
            print(f"rank {rank.rank}{where}   process {rank.pid}   {rank.device}   {state}")
        self._print_mode()

    def dist_debug(self, line: str = "") -> None:
        """The launcher of the ranks, and `%dist_status`."""
        print(f"launcher: process {self.launcher.process.pid}, {self.launcher.gpu_count} GPUs")
        self.dist_status()

    @magic_arguments()
    @argument("--enable", "-e", action="store_true", help="plain cells run on every rank")
    @argument("--disable", "-d", action="store_true", help="plain cells run in the kernel")
    def dist_mode(self, line: str) -> None:
        """Where plain cells run."""
        options = _options(self.dist_mode, line)
        if options.enable:
            self._need_cluster()
        if options.enable or options.disable:
            self.automatic = options.enable
        self._print_mode()

    def _print_mode(self) -> None:
        print(f"Plain cells run {'on every rank' if self.automatic else 'in the kernel'}.")

    # Left out: nbdistributed's history as JavaScript in every output, and its copies of variables

    def _register_timeline_handlers(self) -> None:
        pass

    def _setup_notebook_save_hook(self) -> None:
        pass


def _options(magic: Any, line: str) -> Any:
    try:
        return parse_argstring(magic, line)
    except UsageError as error:
        usage = magic.parser.format_usage().strip().replace("::\n\n", "").strip()
        raise ClusterError(f"{error}. What it takes: {usage}") from None


def answer_from_rank_0(kernel: Any, ask: Callable[[str, dict[str, Any]], dict[str, Any]]) -> None:
    """Complete and inspect what only ranks have. What `ask` does not know is left to the kernel, as before."""
    complete, inspect = kernel.do_complete, kernel.do_inspect

    def do_complete(code: str, cursor_pos: int) -> Any:
        return ask(code, {"kind": "complete", "cursor": cursor_pos}) or complete(code, cursor_pos)

    def do_inspect(code: str, cursor_pos: int, detail_level: int = 0, omit_sections: Any = ()) -> Any:
        found = ask(code, {"kind": "inspect", "cursor": cursor_pos, "detail": detail_level})
        return found or inspect(code, cursor_pos, detail_level, omit_sections)

    kernel.do_complete, kernel.do_inspect = do_complete, do_inspect


class PlainCells:
    """An input transformer: a plain cell becomes `%%distributed`, and `%%rank[0]` becomes `%%rank [0]`.

    A cell that begins with a magic of another kind runs in the kernel, unless the magic measures what follows it.
    """

    def __init__(self, shell: Any, to_ranks: Callable[[], bool]):
        self._to_ranks = to_ranks  # whether plain cells are for the ranks
        self._running = 0  # cells; more than one where a magic such as %%capture runs its body as a cell
        shell.input_transformers_cleanup.append(self.transform)
        shell.events.register("pre_execute", self._begin)
        shell.events.register("post_execute", self._end)

    def _begin(self) -> None:
        self._running += 1

    def _end(self) -> None:
        self._running = max(0, self._running - 1)

    def for_ranks(self, code: str) -> bool:
        """Whether ranks would run this cell."""
        lines = code.splitlines(keepends=True)
        return self.transform(lines) is not lines

    def transform(self, lines: list[str]) -> list[str]:
        code = [i for i, line in enumerate(lines) if line.strip() and not line.lstrip().startswith("#")]
        if not code:
            return lines
        first = code[0]
        if re.match(r"%%(rank|distributed)\b", lines[first]):
            head = re.sub(r"^%%rank(?=\[)", "%%rank ", lines[first])
            return [head, *_body(lines, first)]
        plain = not lines[first].lstrip().startswith("%") or re.match(r"\s*%%?(time|timeit|prun)\b", lines[first])
        if plain and self._to_ranks() and not self._running:
            return ["%%distributed\n", *lines]
        return lines


def _body(lines: list[str], head: int) -> list[str]:
    """What a rank runs. The lines above it become comments, so that line 3 of a message is line 3 of the cell."""
    body = lines[head + 1 :]
    if next((line for line in body if line.strip()), "").startswith("%%"):
        return body  # a magic of the rank's own, such as %%capture, has to stand first
    return [line if line.startswith("#") else f"# {line.strip()}\n" for line in lines[: head + 1]] + body
