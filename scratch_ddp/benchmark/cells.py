"""Rank cells, measured as a learner uses them: through a kernel, from outside."""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil

from scratch_ddp.benchmark import steps
from scratch_ddp.benchmark.kernel import Kernel
from scratch_ddp.instruments.timing import spread_of

_BESIDE_GLOO = """
import json, statistics, time

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
    ratios = []
    for turn in range(turns):  # each is first in every second round: the one after it finds the caches warm
        taken = {group: seconds_per_call(group, tensor, calls) for group in (None, plain)[:: (-1) ** turn]}
        ratios.append(taken[None] / taken[plain])
    found[size] = statistics.median(ratios)
if rank == 0:
    print(json.dumps(found))
"""


@contextlib.contextmanager
def busy_cores() -> Iterator[None]:
    """Keep every core of this machine busy inside the block."""
    command = [sys.executable, "-c", "while True: pass"]
    spinning = [subprocess.Popen(command) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


def first_cells(runs: int) -> steps.Row:
    worked = 0
    with busy_cores():
        for run in range(runs):
            with Kernel(cluster=2 if run % 2 else 4) as kernel:
                worked += not kernel.run("x = torch.ones(1); dist.all_reduce(x)").error
    return "first cell after `%dist_init`, 2 and 4 ranks, all cores busy", f"works {worked} of {runs} times"


def starts(runs: int) -> steps.Row:
    ratios, seconds = [], []
    for _ in range(runs):
        began = time.monotonic()
        subprocess.run([sys.executable, "-c", "import torch"], check=True)
        imported = time.monotonic() - began
        with Kernel() as kernel:
            began = time.monotonic()
            kernel.run("%load_ext scratch_ddp")
            kernel.run("%dist_init -n 4")
            seconds.append(time.monotonic() - began)
        ratios.append(seconds[-1] / imported)
    text = f"{statistics.median(seconds):.2g} s, {statistics.median(ratios):.2f} × one `import torch`"
    return "`%load_ext` and `%dist_init -n 4` until ready", text


def round_trips(world_size: int, cells: int = 100) -> steps.Row:
    with Kernel() as plain, Kernel(cluster=world_size) as ranks:
        pairs = [(plain.run("x = 1").seconds, ranks.run("x = 1").seconds) for _ in range(cells)]
    beyond = statistics.median(ours for _, ours in pairs) - statistics.median(theirs for theirs, _ in pairs)
    return f"trivial cell beyond a plain kernel's, {world_size} ranks, median of {cells}", f"{beyond * 1e3:.1f} ms"


def stops(runs: int) -> steps.Row:
    took, right = [], 0
    with Kernel(cluster=4) as kernel:
        kernel.run("kept = rank")
        for _ in range(runs):
            message, seconds = kernel.stop("if rank == 0:\n    dist.all_reduce(torch.ones(1))")
            took.append(seconds)
            named = "rank 0 waits in all_reduce" in message and "ranks 1–3 never came" in message
            after = kernel.run("dist.all_reduce(x := torch.tensor([kept])); x")
            right += named and "6" in after.text()
    text = f"{spread_of(took)} s; {right} of {runs} with the right names, variables and next collective"
    return "from Stop in a deadlocked collective to the end of the cell, 4 ranks", text


def floods() -> steps.Row:
    with Kernel(cluster=2) as kernel:
        kernel.run("print('warm')")
        before = psutil.Process(kernel.pid).memory_info().rss
        result = kernel.run("%%rank [1]\nfor _ in range(16_000): print('o' * 62_499)", timeout=120)
        grown = (psutil.Process(kernel.pid).memory_info().rss - before) / 1e6
    told = "says what is left out" if "MB left out …" in result.text() else "does not say what is left out"
    return "memory that 1 GB of one rank's output takes in the kernel", f"{grown:.0f} MB; {told}"


def beside_gloo(turns: int = 8) -> list[steps.Row]:
    """all_reduce in the group of rank cells and in plain gloo, interleaved in one run of 2 ranks."""
    with Kernel(cluster=2) as kernel:
        result = kernel.run(f"turns = {turns}\n{_BESIDE_GLOO}", timeout=120)
        assert not result.error, result.traceback
    found = json.loads(result.text().split("   ←")[0])
    return [(f"all_reduce of {int(size):,} bytes / plain gloo's", f"{ratio:.2f}") for size, ratio in found.items()]


def rows(rounds: int) -> Iterator[steps.Row]:
    yield first_cells(rounds)
    yield starts(5)
    yield round_trips(2)
    yield round_trips(4)
    yield stops(rounds)
    yield floods()
    yield from beside_gloo()
