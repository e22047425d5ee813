"""`python -m scratch_ddp.benchmark WHAT`: measure, and print a table for the README. Without WHAT: all of them."""

import argparse
import sys

from scratch_ddp.benchmark import cells, collectives_command, ddp, fsdp, lessons, link, rings, zero

COMMANDS = {
    "cells": (cells, "rank cells: start, round trip, Stop, deaths, ends"),
    "collectives": (collectives_command, "times and bandwidths of collectives"),
    "ddp": (ddp, "steps of the data-parallel strategies beside torch's"),
    "fsdp": (fsdp, "the sharded model beside torch's fully_shard: steps, memory, what a network hides"),
    "lessons": (lessons, "strict nbval of the lessons, again and again"),
    "link": (link, "the simulated link: its exactness, a published table on it, hidden communication"),
    "rings": (rings, "our collectives beside gloo's own"),
    "zero": (zero, "the sharded optimizer: state a rank, bits, steps beside torch's"),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m scratch_ddp.benchmark", description=__doc__)
    commands = parser.add_subparsers(dest="what")
    for name, (module, what) in COMMANDS.items():
        module.add_arguments(commands.add_parser(name, help=what))
    asked = sys.argv[1:]
    ended = 0
    for arguments in [asked] if asked else [[name] for name in COMMANDS]:
        options = parser.parse_args(arguments)
        if not asked:
            print(f"\n## {options.what}\n", flush=True)
        ended = max(ended, COMMANDS[options.what][0].main(options))
    return ended


if __name__ == "__main__":
    sys.exit(main())
