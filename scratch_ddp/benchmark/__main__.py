"""`python -m scratch_ddp.benchmark WHAT`: measure, and print a table of the README. Without WHAT, print all tables."""

import argparse
import subprocess
import sys

from scratch_ddp.benchmark import cells, collectives, link, pipeline, rings, seldom, tensor_parallel, training

COMMANDS = {
    "training": (training, "steps with DDP, FSDP and ZeRO beside torch's classes; the peak memory of a step"),
    "tensor_parallel": (tensor_parallel, "sliced layers beside torch's DTensor: forward and backward"),
    "pipeline": (pipeline, "pipelines beside torch's; stages that sleep, beside the simulated schedule"),
    "rings": (rings, "our collectives beside gloo's own"),
    "collectives": (collectives, "times and bandwidths of collectives"),
    "link": (link, "the simulated link: transfers beside their stated lengths"),
    "seldom": (seldom, "a small model on ranks that meet once in H steps: losses and bytes"),
    "cells": (cells, "rank cells: the first cell, a round trip, Stop, output, a collective beside plain gloo's"),
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
    try:
        COMMANDS[options.what][0].main(options)
    except ValueError as error:
        print(f"{options.what}: {error}", file=sys.stderr)
        return 2
    return 0


def _in_its_own_process(name: str) -> int:
    """Run a command and return its exit status. Ranks are forked, so their parent must not have run another command."""
    print(f"\n## {name}\n", flush=True)
    return subprocess.call([sys.executable, "-m", "scratch_ddp.benchmark", name])


if __name__ == "__main__":
    sys.exit(main())
