"""`python -m scratch_ddp.benchmark WHAT`: measure, and print a table for the README. Without WHAT, print all tables."""

import argparse
import subprocess
import sys

from scratch_ddp.benchmark import (
    collectives,
    ddp,
    fsdp,
    lessons,
    link,
    pipeline,
    plan,
    profiling,
    rings,
    tensor_parallel,
    zero,
)
from scratch_ddp.benchmark.rank_cells import one_host

COMMANDS = {
    "cells": (one_host, "rank cells: start, round trip, Stop, killed ranks, shutdown"),
    "collectives": (collectives, "times and bandwidths of collectives"),
    "ddp": (ddp, "steps of the data-parallel strategies against torch's"),
    "fsdp": (fsdp, "the sharded model against torch's fully_shard: steps, memory, hidden communication"),
    "lessons": (lessons, "strict nbval of the lessons, repeatedly"),
    "link": (link, "the simulated link: its exactness, a published table, hidden communication, DP against TP and PP"),
    "pipeline": (pipeline, "pipelines against torch's; stages that sleep against the simulated schedule"),
    "profiling": (profiling, "a step's parts against its length; planted faults, named from the profile alone"),
    "plan": (plan, "forecasts of whole layouts: against steps on the simulated link, and against published trainings"),
    "rings": (rings, "our collectives against gloo's own"),
    "tensor_parallel": (tensor_parallel, "sliced layers against torch's DTensor: forward and backward"),
    "zero": (zero, "the sharded optimizer: state per rank, weights, steps against torch's"),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m scratch_ddp.benchmark", description=__doc__)
    commands = parser.add_subparsers(dest="what")
    for name, (module, what) in COMMANDS.items():
        module.add_arguments(commands.add_parser(name, help=what))
    options = parser.parse_args()
    if options.what is None:
        ended = [_in_its_own_process(name) for name in COMMANDS]
        return int(any(ended))
    return COMMANDS[options.what][0].main(options)


def _in_its_own_process(name: str) -> int:
    """Run a command and return its exit status. Ranks are forked, so their parent must not have run another command."""
    print(f"\n## {name}\n", flush=True)
    return subprocess.call([sys.executable, "-m", "scratch_ddp.benchmark", name])


if __name__ == "__main__":
    sys.exit(main())
