"""`python -m scratch_ddp.benchmark WHAT`: measure, and print a table of the README."""

import argparse

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


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m scratch_ddp.benchmark", description=__doc__)
    commands = parser.add_subparsers(dest="what", required=True)
    for name, (module, what) in COMMANDS.items():
        module.add_arguments(commands.add_parser(name, help=what))
    options = parser.parse_args()
    try:
        COMMANDS[options.what][0].main(options)
    except ValueError as error:
        raise SystemExit(f"{options.what}: {error}") from None


if __name__ == "__main__":
    main()
