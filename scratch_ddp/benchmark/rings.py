"""Our collectives beside gloo's own, on 2 ranks, in turns."""

import argparse
from functools import partial

import torch
import torch.distributed as dist

from scratch_ddp.benchmark import steps
from scratch_ddp.instruments.bandwidth.operations import OPERATIONS, Workspace
from scratch_ddp.instruments.sizes import format_size, parse_size
from scratch_ddp.instruments.timing import Sample, interleaved

SIZES = ("8MiB", "64MiB", "256MiB")
PAIRS = (
    ("ring_all_reduce", "all_reduce"),
    ("unchecked_ring_all_reduce", "all_reduce"),
    ("direct_reduce_scatter", "reduce_scatter"),
    ("direct_all_gather", "all_gather"),
)


def measure(rounds: int, size: int) -> dict[str, list[Sample]]:
    """On each rank: all operations at one size in bytes, in turns. Collective."""
    space = Workspace(size, dist.group.WORLD, torch.device("cpu"))
    names = dict.fromkeys(name for pair in PAIRS for name in pair)
    return interleaved({name: partial(OPERATIONS[name].run, space) for name in names}, rounds)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    steps.add_arguments(parser, rounds=40)
    parser.add_argument("--sizes", nargs="+", default=SIZES, metavar="SIZE", help=f"default: {' '.join(SIZES)}")


def main(options: argparse.Namespace) -> None:
    sizes = [parse_size(size) for size in options.sizes]
    steps.prepare(options, "Collectives")
    rows = []
    for size in sizes:
        found = steps.on_ranks(options.ranks, measure, options.rounds, size)
        rows += [(f"{format_size(size)}: our {what}", figure) for what, figure in steps.beside(found, PAIRS)]
    steps.show(rows)
