"""`python -m scratch_ddp.benchmark WHAT`: measure, and print a table for the README."""

import argparse
import sys

from scratch_ddp.benchmark import cells, collectives_command, ddp, fsdp, link, rings, zero

COMMANDS = {
    "cells": (cells, "rank cells: start, round trip, Stop, deaths, ends"),
    "collectives": (collectives_command, "times and bandwidths of collectives"),
    "ddp": (ddp, "steps of the data-parallel strategies beside torch's"),
    "fsdp": (fsdp, "the sharded model beside torch's fully_shard: steps, memory, what a network hides"),
    "link": (link, "the simulated link: its exactness, a published table on it, hidden communication"),
    "rings": (rings, "our collectives beside gloo's own"),
    "zero": (zero, "the sharded optimizer: state a rank, bits, steps beside torch's"),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m scratch_ddp.benchmark", description=__doc__)
    commands = parser.add_subparsers(dest="what", required=True)
    for name, (module, what) in COMMANDS.items():
        module.add_arguments(commands.add_parser(name, help=what))
    options = parser.parse_args()
    return COMMANDS[options.what][0].main(options)


if __name__ == "__main__":
    sys.exit(main())
