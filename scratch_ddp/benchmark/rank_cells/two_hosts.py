"""Rank cells over two hosts (two agents on this machine, or two network namespaces), measured through a kernel."""

import argparse
import os
import signal
import statistics
import subprocess
import threading
import time
from collections.abc import Callable

from scratch_ddp.benchmark.command import TableRow, median_and_range, report
from scratch_ddp.benchmark.rank_cells.hosts import JOIN, HostsOfKernel, by_hand, in_namespaces
from scratch_ddp.benchmark.rank_cells.kernel import Kernel
from scratch_ddp.benchmark.rank_cells.processes import wait_until_gone
from scratch_ddp.instruments import namespaces
from scratch_ddp.instruments.timing import machine

_DEADLOCK = "if rank != 2:\n    dist.all_reduce(torch.ones(1))"
_TALK = "import time\nwhile True:\n    time.sleep(0.05)\n    dist.all_reduce(torch.ones(1))"
_SUM = "dist.all_reduce(x := torch.tensor([kept])); x.item()"


def round_trips(cells: int = 100) -> TableRow:
    with Kernel(cluster=4) as one, Kernel() as two:
        hosts = _two_hosts(two)
        pairs = [(one.run("x = 1").seconds, two.run("x = 1").seconds) for _ in range(cells)]
        hosts.end()
    first, second = (statistics.median(each) for each in zip(*pairs, strict=True))
    text = f"{(second - first) * 1e3:.1f} ms ({second * 1e3:.1f} against {first * 1e3:.1f})"
    what = f"trivial cell over two hosts beyond one host's, 4 ranks, median of {cells}"
    return TableRow(what, "< 10 ms", text, second - first < 0.010)


def stops(runs: int) -> TableRow:
    """Stop in a deadlock over both hosts: the time, who never came, and that variables and collectives still work."""
    took, right = [], 0
    with Kernel() as kernel:
        hosts = _two_hosts(kernel)
        for _ in range(runs):
            kernel.run("kept = rank")
            message, seconds = kernel.stop(_DEADLOCK)
            took.append(seconds)
            named = "ranks 0–1, 3 wait in all_reduce" in message and "rank 2 never came" in message
            right += named and kernel.run(_SUM).text() == "6   ← ranks 0–3\n"
        hosts.end()
    text = f"{median_and_range(took)}, {right} of {runs} right"
    return TableRow("Stop in a deadlock over two hosts", "< 1 s", text, max(took) < 1 and right == runs)


def lost(runs: int, what: str, whom: Callable[[HostsOfKernel, Kernel], int], told: str) -> TableRow:
    """A process of the second host is killed during a collective: the time until the cell names it."""
    took = []
    with Kernel() as kernel:
        for _ in range(runs):
            hosts = _two_hosts(kernel)
            victim = whom(hosts, kernel)
            cell = kernel.start(_TALK)
            time.sleep(1)
            began = time.monotonic()
            os.kill(victim, signal.SIGKILL)
            message = kernel.finish(cell).message
            took.append(time.monotonic() - began)
            assert told in message, message
            family = hosts.family()
            kernel.run("%dist_shutdown")
            wait_until_gone(family, 3)
    return TableRow(f"{what}, named", "< 1 s", f"{median_and_range(took)}, {runs} of {runs} right", max(took) < 1)


def cables(runs: int) -> TableRow:
    what, must = "a cable pulled: named by the notebook; the far ranks gone", "< 10 s"
    if missing := namespaces.missing():
        return TableRow(what, must, f"not measured: {missing}", True)
    named, gone = [], []
    with namespaces.connected(), Kernel(within=namespaces.within(namespaces.NAMES[0])) as kernel:
        kernel.run("%load_ext scratch_ddp")
        for _ in range(runs):
            hosts = HostsOfKernel(kernel, namespaces.ADDRESSES[0], in_namespaces)
            hosts.init()
            cell = kernel.start(_TALK)
            time.sleep(1)
            began = time.monotonic()
            namespaces.plug("down")
            message = kernel.finish(cell).message
            named.append(time.monotonic() - began)
            assert f"({namespaces.ADDRESSES[1]}), which no longer answers" in message, message
            namespaces.wait_until_empty(namespaces.NAMES[1], 20)
            gone.append(time.monotonic() - began)
            namespaces.plug("up")
            kernel.run("%dist_shutdown")
            hosts.end()
    text = f"{median_and_range(named)}; {median_and_range(gone)}, {runs} of {runs} right"
    return TableRow(what, must, text, max(*named, *gone) < 10)


def ends(runs: int, what: str, end: Callable[[Kernel], object]) -> TableRow:
    """The time until no process is left on either host."""
    took = []
    for _ in range(runs):
        with Kernel() as kernel:
            family = _two_hosts(kernel).family()
            ending = threading.Thread(target=end, args=(kernel,))  # a restart lasts until the new kernel answers
            ending.start()
            took.append(wait_until_gone(family, 10))
            ending.join()
    return TableRow(f"both hosts empty after {what}", "< 2 s", f"{median_and_range(took)} in {runs}", max(took) < 2)


def used_tickets(runs: int) -> TableRow:
    refused = 0
    with Kernel() as kernel:
        hosts = _two_hosts(kernel)
        for _ in range(runs):
            late = subprocess.run(JOIN, input=hosts.ticket, capture_output=True, text=True, timeout=30)
            refused += late.returncode == 1 and "the ticket has been used" in late.stdout
        works = kernel.run("print(rank)").status == "ok"
        hosts.end()
    text = f"{refused} of {runs} refused"
    return TableRow("a used ticket", "nobody in, nothing stopped", text, refused == runs and works)


def _two_hosts(kernel: Kernel) -> HostsOfKernel:
    kernel.run("%load_ext scratch_ddp")
    hosts = HostsOfKernel(kernel, start=by_hand)
    hosts.init()
    return hosts


def _agent(hosts: HostsOfKernel, kernel: Kernel) -> int:
    return hosts.agents[1].agent()


def _rank(hosts: HostsOfKernel, kernel: Kernel) -> int:
    return kernel.pids()[3]


def main(options: argparse.Namespace) -> int:
    runs = options.runs
    print(f"Rank cells over two hosts on {machine()}.\n", flush=True)
    rows = [round_trips(), stops(runs)]
    rows.append(lost(runs, "a rank killed on the far host", _rank, "rank 3 was ended by SIGKILL"))
    rows.append(lost(runs, "an agent killed", _agent, "whose agent has ended"))
    rows.append(cables(runs))
    rows.append(ends(runs, "%dist_shutdown", lambda kernel: kernel.run("%dist_shutdown")))
    rows.append(ends(runs, "a restart", lambda kernel: kernel.restart()))
    rows.append(ends(runs, "SIGKILL of the kernel", lambda kernel: kernel.kill()))
    return report([*rows, used_tickets(runs)])
