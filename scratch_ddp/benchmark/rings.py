"""Our collectives beside gloo's own, on 2 ranks: how many times as long do they take?"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from scratch_ddp.benchmark.options import seconds
from scratch_ddp.instruments.bandwidth.operations import OPERATIONS, Workspace, memory
from scratch_ddp.instruments.bandwidth.room import Place, free_memory, refuse_what_does_not_fit
from scratch_ddp.instruments.forked_ranks import run_ranks
from scratch_ddp.instruments.sizes import UNITS, format_size, parse_size
from scratch_ddp.instruments.timing import Figure, Sample, interleaved, machine, markdown, ratio

RANKS = 2
SIZES = ("8MiB", "64MiB", "256MiB")


@dataclass(frozen=True)
class Pair:
    """Ours, torch's, and how many times as much CPU time ours may take from `least` bytes on."""

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
    """On each rank: times of all operations at one size (bytes), in turns. Every rank calls it alike."""
    space = Workspace(size, dist.group.WORLD, torch.device("cpu"), second=False)
    names = dict.fromkeys(name for pair in PAIRS for name in (pair.ours, pair.theirs))
    return interleaved({name: partial(OPERATIONS[name].run, space, 0) for name in names}, rounds=rounds, warm_up=3)


def figures(size: int, samples: Mapping[str, Sequence[Sample]]) -> list[Figure]:
    """A row for each pair: medians over the rounds of CPU time, which is judged, and of wall time."""
    rows = []
    for pair in PAIRS:
        cpu, wall = (ratio(samples[pair.ours], samples[pair.theirs], figure) for figure in ("cpu", "wall"))
        judged = size >= pair.least
        what = f"our {pair.ours} / gloo's {pair.theirs}, {format_size(size)}, {len(samples[pair.ours])} rounds"
        must = f"≤ {pair.must:.2f}" if judged else "said"
        text = f"{cpu} of the CPU time, {wall} of the time"
        rows.append(Figure(what, must, text, not judged or cpu.median <= pair.must))
    return rows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sizes", nargs="+", default=SIZES, metavar="SIZE", help=f"default: {' '.join(SIZES)}")
    parser.add_argument("--seconds", type=seconds, default=20.0, help="for each size, about (default: 20)")


def main(options: argparse.Namespace) -> int:
    operations = [OPERATIONS[name] for pair in PAIRS for name in (pair.ours, pair.theirs)]
    try:
        sizes = [parse_size(size) for size in options.sizes]
        here = Place(0, free_memory())
        refuse_what_does_not_fit(sizes, [RANKS], [here] * RANKS, partial(memory, operations))
    except ValueError as error:
        print(f"rings: {error}", file=sys.stderr)
        return 2
    print(
        f"Collectives of {RANKS} ranks on {machine()}, torch {torch.__version__}. Median [quartiles] of ratios.\n",
        flush=True,
    )
    found = []
    for size in sizes:
        once = run_ranks(RANKS, compare, size, 1, timeout=600)[0]
        turn = sum(taken.wall for samples in once.values() for taken in samples)
        rounds = min(max(round(options.seconds / turn), 5), 400)
        found += figures(size, run_ranks(RANKS, compare, size, rounds, timeout=600 + 10 * options.seconds)[0])
    print(markdown(found))
    return 0 if all(figure.holds for figure in found) else 1
