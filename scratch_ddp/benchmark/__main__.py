"""`python -m scratch_ddp.benchmark WHAT`: measure, and print a table for the README."""

import argparse
import sys

from scratch_ddp.benchmark import cells, collectives_command


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m scratch_ddp.benchmark", description=__doc__)
    commands = parser.add_subparsers(dest="what", required=True)
    cells.add_arguments(commands.add_parser("cells", help="rank cells: start, round trip, Stop, deaths, ends"))
    collectives_command.add_arguments(commands.add_parser("collectives", help="times and bandwidths of collectives"))
    options = parser.parse_args()
    return {"cells": cells.main, "collectives": collectives_command.main}[options.what](options)


if __name__ == "__main__":
    sys.exit(main())
