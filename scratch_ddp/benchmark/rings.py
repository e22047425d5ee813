"""Our collectives against gloo's own, on 2 ranks: how many times as much time do they take?"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from scratch_ddp.benchmark.command import REPORTED, TableRow, cpu_row, positive_seconds, report
from scratch_ddp.instruments.bandwidth.operations import OPERATIONS, Workspace
from scratch_ddp.instruments.forked_ranks import run_ranks
from scratch_ddp.instruments.sizes import UNITS, format_size, parse_size
from scratch_ddp.instruments.timing import Sample, interleaved, machine

RANKS = 2
SIZES = ("8MiB", "64MiB", "256MiB")


@dataclass(frozen=True)
class Pair:
    """Ours, torch's, and how many times torch's CPU time ours may take from `least` bytes on."""

    ours: str
    theirs: str
    must: float
    least: int


PAIRS = (
    Pair("ring_all_reduce", "all_reduce", 1.2, 8 * UNITS["MB"]),
    Pair("unchecked_ring_all_reduce", "all_reduce", 1.2, 8 * UNITS["MB"]),
    Pair("direct_reduce_scatter", "reduce_scatter", 0.5, 64 * UNITS["MB"]),
    Pair("direct_all_gather", "all_gather", 0.4, 64 * UNITS["MB"]),
)


def compare(size: int, rounds: int) -> dict[str, list[Sample]]:
    """On each rank: times of all operations at one size in bytes, in turns. Collective."""
    space = Workspace(size, dist.group.WORLD, torch.device("cpu"))
    names = dict.fromkeys(name for pair in PAIRS for name in (pair.ours, pair.theirs))
    return interleaved({name: partial(OPERATIONS[name].run, space, 0) for name in names}, rounds=rounds, warm_up=3)


def rows(size: int, samples: Mapping[str, Sequence[Sample]]) -> list[TableRow]:
    """A row for each pair: CPU time, which is judged from a size on, and wall time."""
    found = []
    for pair in PAIRS:
        what = f"our {pair.ours} / gloo's {pair.theirs}, {format_size(size)}, {len(samples[pair.ours])} rounds"
        target = (f"≤ {pair.must:.2f}", pair.must) if size >= pair.least else (REPORTED, None)
        found.append(cpu_row(what, samples[pair.ours], samples[pair.theirs], *target))
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sizes", nargs="+", default=SIZES, metavar="SIZE", help=f"default: {' '.join(SIZES)}")
    parser.add_argument("--seconds", type=positive_seconds, default=20.0, help="time per size, about (default: 20)")


def main(options: argparse.Namespace) -> int:
    try:
        sizes = [parse_size(size) for size in options.sizes]
    except ValueError as error:
        print(f"rings: {error}", file=sys.stderr)
        return 2
    where = f"{machine()}, torch {torch.__version__}"
    print(f"Collectives of {RANKS} ranks on {where}. Median [quartiles] of ratios.\n", flush=True)
    found = []
    for size in sizes:
        once = run_ranks(RANKS, compare, size, 1, timeout=600)[0]
        turn = sum(taken.wall for samples in once.values() for taken in samples)
        rounds = min(max(round(options.seconds / turn), 5), 400)
        found += rows(size, run_ranks(RANKS, compare, size, rounds, timeout=600 + 10 * options.seconds)[0])
    return report(found)
