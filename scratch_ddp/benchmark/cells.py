"""Rank cells, measured as a learner meets them: through a kernel, from the outside."""

import argparse
import ipaddress
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from scratch_ddp.benchmark.kernel import Kernel, wait_until_gone
from scratch_ddp.benchmark.lessons import busy_cores
from scratch_ddp.benchmark.options import count
from scratch_ddp.instruments.timing import Figure, machine, markdown, spread

# FOLDED: Which sockets a process listens on, read from /proc (Linux).

_LISTENING = "0A"
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def listening_addresses(pid: int) -> set[Address]:
    """The addresses on which a process accepts TCP connections or receives UDP."""
    sockets, addresses = _socket_inodes(pid), set()
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[9] in sockets and (fields[3] == _LISTENING or table.startswith("udp")):
                addresses.add(_address(fields[1].split(":")[0]))
    return addresses


def listening_beyond_loopback(pids: Iterable[int]) -> list[str]:
    """ "process 12 listens on 0.0.0.0" for every address of the processes that other machines can reach."""
    return [
        f"process {pid} listens on {address}"
        for pid in pids
        for address in listening_addresses(pid)
        if not address.is_loopback
    ]


def _socket_inodes(pid: int) -> set[str]:
    inodes = set()
    for file in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(file)
        except OSError:  # closed meanwhile
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    return inodes


def _address(text: str) -> Address:
    """/proc writes an address as 32-bit words in the machine's byte order (little-endian here)."""
    words = [bytes.fromhex(text[start : start + 8])[::-1] for start in range(0, len(text), 8)]
    address = ipaddress.ip_address(b"".join(words))
    return getattr(address, "ipv4_mapped", None) or address


# FOLDED: What the interruptible process group of rank cells costs, beside plain gloo.

_MEASURE = """
import json
import statistics
import time

plain = dist.new_group(backend="gloo")


def seconds_a_call(group, tensor, calls):
    dist.barrier(group=plain)
    began = time.perf_counter()
    for _ in range(calls):
        dist.all_reduce(tensor, group=group)
    return (time.perf_counter() - began) / calls


found = {}
for size, calls in ((4, 200), (2**20, 40), (2**23, 10)):
    tensor = torch.zeros(size // 4)
    pairs = [(seconds_a_call(None, tensor, calls), seconds_a_call(plain, tensor, calls)) for _ in range(7)]
    found[size] = [statistics.median(watched / other for watched, other in pairs), *map(statistics.median, zip(*pairs))]
if rank == 0:
    print(json.dumps(found))
"""


def watched_group() -> list[Figure]:
    """all_reduce in the group of rank cells and in a plain one, interleaved in one run, 2 ranks."""
    with Kernel(cluster=2) as kernel:
        result = kernel.run(_MEASURE, timeout=120)
        assert not result.error, result.traceback
        found = json.loads(result.text().split("   ←")[0])
    figures = []
    for size, (ratio, watched, plain) in found.items():
        small = int(size) < 2**20
        what = f"all_reduce of {int(size):,} bytes / plain gloo's, 2 ranks"
        text = f"{ratio:.2f} × ({watched * 1e3:.2f} ms against {plain * 1e3:.2f} ms)"
        figures.append(Figure(what, "said" if small else "≤ 1.2", text, small or ratio <= 1.2))
    return figures


_ONE_SLEEPS = "import time\nif rank != 2:\n    dist.all_reduce(torch.ones(1))\nelse:\n    time.sleep(60)"
_DEADLOCK = "if rank == 0:\n    dist.all_reduce(torch.ones(1))"


def first_cells(runs: int) -> Figure:
    worked = 0
    with busy_cores():
        for run in range(runs):
            with Kernel(cluster=2 if run % 2 else 4) as kernel:
                worked += not kernel.run("x = torch.ones(1); dist.all_reduce(x)").error
    text = f"{worked} of {runs}"
    return Figure("first cell after `%dist_init`, 2 and 4 ranks, all cores busy", "all", text, worked == runs)


def round_trips(world_size: int, must: float, cells: int = 100) -> Figure:
    with Kernel() as plain, Kernel(cluster=world_size) as ranks:
        pairs = [(plain.run("x = 1").seconds, ranks.run("x = 1").seconds) for _ in range(cells)]
    beyond = statistics.median(ours for _, ours in pairs) - statistics.median(theirs for theirs, _ in pairs)
    what = f"trivial cell beyond a plain kernel's, {world_size} ranks, median of {cells}"
    return Figure(what, f"< {must * 1e3:g} ms", f"{beyond * 1e3:.1f} ms", beyond < must)


def starts(runs: int) -> list[Figure]:
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
    first = f"{ratio:.2f} × ({spread(firsts)} against {spread(imports)})"
    return [
        Figure("`%load_ext` and `%dist_init -n 4` / `import torch`", "≤ 1.5", first, ratio <= 1.5),
        Figure("a second cluster in the same kernel", "< 1 s", spread(seconds), max(seconds) < 1),
    ]


def stops(runs: int) -> Figure:
    took, right = [], 0
    with Kernel(cluster=4) as kernel:
        kernel.run("kept = rank")
        for _ in range(runs):
            cell = kernel.start(_DEADLOCK)
            time.sleep(1)
            began = time.monotonic()
            kernel.interrupt()
            message = kernel.finish(cell).message
            took.append(time.monotonic() - began)
            named = "rank 0 waits in all_reduce" in message and "ranks 1–3 never came" in message
            after = kernel.run("dist.all_reduce(x := torch.tensor([kept])); x")
            right += named and "6" in after.text()
    text = f"{spread(took)}, {right} of {runs} with the right names, variables and next collective"
    return Figure("Stop in a deadlocked collective until the cell ends", "< 3 s", text, max(took) < 3 and right == runs)


def deaths(runs: int) -> list[Figure]:
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
        Figure("a killed rank named: from the next cell's start", "≤ 1 s", spread(idle), max(idle) <= 1),
        Figure("a killed rank named: inside a collective, from its death", "≤ 1 s", spread(inside), max(inside) <= 1),
    ]


def ends(runs: int) -> Figure:
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
    return Figure("all ranks gone (longest of each)", "< 2 s", text, max(longest.values()) < 2)


def floods() -> Figure:
    size = 10_000_000
    with Kernel(cluster=2) as kernel:
        code = f"import sys\nif rank == 1:\n    sys.stdout.write('o' * {size}); sys.stderr.write('e' * {size})"
        result = kernel.run(code, timeout=120)
    arrived = result.text().count("o") >= size and result.text("stderr").count("e") == size
    text = f"{'arrived' if arrived else 'lost'} in {result.seconds:.1f} s"
    return Figure("10 MB to stdout and to stderr from one rank", "arrives", text, arrived)


def saved_size() -> Figure:
    import nbformat
    from nbclient import NotebookClient

    sources = ["%load_ext scratch_ddp", "%dist_init -n 4", *["print(rank)"] * 60]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    NotebookClient(notebook, timeout=60).execute()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "sixty.ipynb"
        nbformat.write(notebook, path)
        size = path.stat().st_size / 1000
    return Figure("a notebook of 60 small cells, saved", "< 60 KB", f"{size:.0f} KB", size < 60)


def sockets() -> Figure:
    with Kernel(cluster=4) as kernel:
        kernel.run("dist.all_reduce(torch.ones(1))")
        found = listening_beyond_loopback(kernel.pids())
    return Figure("sockets of ranks open beyond loopback", "none", ", ".join(found) or "none", not found)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--runs", type=count, default=5, help="runs of each measurement (default 5)")
    parser.add_argument("--first-cells", type=count, default=20, help="kernels started for the first row (default 20)")


def main(options: argparse.Namespace) -> int:
    print(f"Rank cells on {machine()}.\n", flush=True)
    figures = [first_cells(options.first_cells), round_trips(2, 0.005), round_trips(4, 0.010), *starts(options.runs)]
    figures += [
        stops(options.runs),
        *deaths(options.runs),
        ends(options.runs),
        floods(),
        saved_size(),
        sockets(),
        *watched_group(),
    ]
    print(markdown(figures))
    return 0 if all(figure.holds for figure in figures) else 1
