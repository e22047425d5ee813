"""Rank cells, measured as a learner uses them: through a kernel, from outside."""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from scratch_ddp.benchmark.command import REPORTED, TableRow, median_and_range, positive_count, report
from scratch_ddp.benchmark.rank_cells import two_hosts
from scratch_ddp.benchmark.rank_cells.kernel import Kernel
from scratch_ddp.benchmark.rank_cells.processes import busy_cores, listening_beyond_loopback, wait_until_gone
from scratch_ddp.commands.notebooks import run
from scratch_ddp.instruments.timing import machine

_ONE_SLEEPS = "import time\nif rank != 2:\n    dist.all_reduce(torch.ones(1))\nelse:\n    time.sleep(60)"
_DEADLOCK = "if rank == 0:\n    dist.all_reduce(torch.ones(1))"
_RANK_CELL_GROUP = """
import json
import statistics
import time

plain = dist.new_group(backend="gloo")


def seconds_per_call(group, tensor, calls):
    dist.barrier(group=plain)
    began = time.perf_counter()
    for _ in range(calls):
        dist.all_reduce(tensor, group=group)
    return (time.perf_counter() - began) / calls


found = {}
for size, calls in ((4, 200), (2**20, 40), (2**23, 10)):
    tensor = torch.zeros(size // 4)
    pairs = [(seconds_per_call(None, tensor, calls), seconds_per_call(plain, tensor, calls)) for _ in range(7)]
    found[size] = [statistics.median(ours / other for ours, other in pairs), *map(statistics.median, zip(*pairs))]
if rank == 0:
    print(json.dumps(found))
"""


def first_cells(runs: int) -> TableRow:
    worked = 0
    with busy_cores():
        for run in range(runs):
            with Kernel(cluster=2 if run % 2 else 4) as kernel:
                worked += not kernel.run("x = torch.ones(1); dist.all_reduce(x)").error
    text = f"{worked} of {runs}"
    return TableRow("first cell after `%dist_init`, 2 and 4 ranks, all cores busy", "all", text, worked == runs)


def round_trips(world_size: int, must: float, cells: int = 100) -> TableRow:
    with Kernel() as plain, Kernel(cluster=world_size) as ranks:
        pairs = [(plain.run("x = 1").seconds, ranks.run("x = 1").seconds) for _ in range(cells)]
    beyond = statistics.median(ours for _, ours in pairs) - statistics.median(theirs for theirs, _ in pairs)
    what = f"trivial cell beyond a plain kernel's, {world_size} ranks, median of {cells}"
    return TableRow(what, f"< {must * 1e3:g} ms", f"{beyond * 1e3:.1f} ms", beyond < must)


def starts(runs: int) -> list[TableRow]:
    imports, firsts, seconds = [], [], []
    for _ in range(runs):
        began = time.monotonic()
        subprocess.run([sys.executable, "-c", "import torch"], check=True)
        imports.append(time.monotonic() - began)
        with Kernel() as kernel:
            began = time.monotonic()
            kernel.run("%load_ext scratch_ddp")
            kernel.run("%dist_init -n 4")
            firsts.append(time.monotonic() - began)
            kernel.run("%dist_shutdown")
            seconds.append(kernel.run("%dist_init -n 4").seconds)
    ratio = statistics.median(first / one for first, one in zip(firsts, imports, strict=True))
    first = f"{ratio:.2f} × ({median_and_range(firsts)} against {median_and_range(imports)})"
    return [
        TableRow("`%load_ext` and `%dist_init -n 4` / `import torch`", "≤ 1.5", first, ratio <= 1.5),
        TableRow("a second cluster in the same kernel", "< 1 s", median_and_range(seconds), max(seconds) < 1),
    ]


def stops(runs: int) -> TableRow:
    took, right = [], 0
    with Kernel(cluster=4) as kernel:
        kernel.run("kept = rank")
        for _ in range(runs):
            message, seconds = kernel.stop(_DEADLOCK)
            took.append(seconds)
            named = "rank 0 waits in all_reduce" in message and "ranks 1–3 never came" in message
            after = kernel.run("dist.all_reduce(x := torch.tensor([kept])); x")
            right += named and "6" in after.text()
    text = f"{median_and_range(took)}, {right} of {runs} with the right names, variables and next collective"
    return TableRow(
        "Stop in a deadlocked collective until the cell ends", "< 3 s", text, max(took) < 3 and right == runs
    )


def deaths(runs: int) -> list[TableRow]:
    idle, inside = [], []
    with Kernel(cluster=4) as kernel:
        for _ in range(runs):
            pids = kernel.pids()
            os.kill(pids[2], signal.SIGKILL)
            result = kernel.run("1")
            assert "rank 2 was ended by SIGKILL" in result.message, result.message
            idle.append(result.seconds)
            kernel.run("%dist_init -n 4")
            pids = kernel.pids()
            cell = kernel.start(_ONE_SLEEPS)
            time.sleep(1)
            began = time.monotonic()
            os.kill(pids[2], signal.SIGKILL)
            result = kernel.finish(cell)
            assert "rank 2 was ended by SIGKILL" in result.message, result.message
            inside.append(time.monotonic() - began)
            kernel.run("%dist_init -n 4")
    return [
        TableRow("a killed rank named: from the next cell's start", "≤ 1 s", median_and_range(idle), max(idle) <= 1),
        TableRow(
            "a killed rank named: inside a collective, from its death",
            "≤ 1 s",
            median_and_range(inside),
            max(inside) <= 1,
        ),
    ]


def ends(runs: int) -> TableRow:
    ways: dict[str, Callable[[Kernel], object]] = {
        "%dist_shutdown": lambda kernel: kernel.run("%dist_shutdown"),
        "restart": lambda kernel: kernel.restart(),
        "SIGKILL of the kernel": lambda kernel: kernel.kill(),
    }
    longest = {}
    for way, end in ways.items():
        for _ in range(runs):
            with Kernel(cluster=4) as kernel:
                pids = kernel.pids()
                began = time.monotonic()
                end(kernel)
                wait_until_gone(pids, 10)
                longest[way] = max(longest.get(way, 0), time.monotonic() - began)
    text = ", ".join(f"{way} {seconds:.2f} s" for way, seconds in longest.items())
    return TableRow("all ranks gone (longest of each)", "< 2 s", text, max(longest.values()) < 2)


def floods() -> TableRow:
    with Kernel(cluster=2) as kernel:
        kernel.run("print('warm')")
        before = psutil.Process(kernel.pid).memory_info().rss
        result = kernel.run("%%rank [1]\nfor _ in range(16_000): print('o' * 62_499)", timeout=120)
        grown = (psutil.Process(kernel.pid).memory_info().rss - before) / 1e6
    told = "MB) left out …" in result.text()
    text = f"{grown:.0f} MB, {'said' if told else 'not said'}, in {result.seconds:.1f} s"
    must = "< 50 MB, says what is left out"
    return TableRow("memory that 1 GB of one rank's output takes in the kernel", must, text, told and grown < 50)


def saved_size() -> TableRow:
    import nbformat

    sources = ["%load_ext scratch_ddp", "%dist_init -n 4", *["print(rank)"] * 60]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    run(notebook, Path.cwd(), cell_timeout=60)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "sixty.ipynb"
        nbformat.write(notebook, path)
        size = path.stat().st_size / 1000
    return TableRow("a notebook of 60 small cells, saved", "< 60 KB", f"{size:.0f} KB", size < 60)


def sockets() -> TableRow:
    with Kernel(cluster=4) as kernel:
        kernel.run("dist.all_reduce(torch.ones(1))")
        found = listening_beyond_loopback(kernel.pids())
    return TableRow("sockets of ranks open beyond loopback", "none", ", ".join(found) or "none", not found)


def rank_cell_group() -> list[TableRow]:
    """all_reduce in the interruptible group of rank cells and in plain gloo, interleaved in one run of 2 ranks."""
    with Kernel(cluster=2) as kernel:
        result = kernel.run(_RANK_CELL_GROUP, timeout=120)
        assert not result.error, result.traceback
        found = json.loads(result.text().split("   ←")[0])
    rows = []
    for size, (ratio, ours, plain) in found.items():
        small = int(size) < 2**20
        what = f"all_reduce of {int(size):,} bytes / plain gloo's, 2 ranks"
        text = f"{ratio:.2f} × ({ours * 1e3:.2f} ms against {plain * 1e3:.2f} ms)"
        rows.append(TableRow(what, REPORTED if small else "≤ 1.2", text, small or ratio <= 1.2))
    return rows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--runs", type=positive_count, default=5, help="runs of each measurement (default: 5)")
    parser.add_argument("--first-cells", type=positive_count, default=20, help="kernels of the first row (default: 20)")
    parser.add_argument("--hosts", action="store_true", help="ranks on two hosts instead of one machine")


def main(options: argparse.Namespace) -> int:
    if options.hosts:
        return two_hosts.main(options)
    print(f"Rank cells on {machine()}.\n", flush=True)
    rows = [first_cells(options.first_cells), round_trips(2, 0.005), round_trips(4, 0.010), *starts(options.runs)]
    rows += [stops(options.runs), *deaths(options.runs), ends(options.runs)]
    return report([*rows, floods(), saved_size(), sockets(), *rank_cell_group()])
