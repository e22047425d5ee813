"""`python -m scratch_ddp.benchmark WHAT`: measure, and print a table of the README."""

import argparse

from scratch_ddp.benchmark import cells, collectives, link, pipeline, rings, seldom, tensor_parallel, training
from scratch_ddp.instruments.sizes import count

COMMANDS = {  # what measures, what it measures, and how many rounds by default
    "training": (training, "steps with DDP, FSDP and ZeRO beside torch's classes; the peak memory of a step", 20),
    "tensor_parallel": (tensor_parallel, "sliced layers beside torch's DTensor: forward and backward", 20),
    "pipeline": (pipeline, "pipelines beside torch's; stages that sleep, beside the simulated schedule", 20),
    "rings": (rings, "our collectives beside gloo's own", 40),
    "collectives": (collectives, "times and bandwidths of collectives", None),
    "link": (link, "the simulated link: transfers beside their stated lengths", 20),
    "seldom": (seldom, "a small model on ranks that meet once in H steps: losses and bytes", 3),
    "cells": (cells, "rank cells: the first cell, a round trip, Stop, output, a collective beside plain gloo's", 20),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m scratch_ddp.benchmark", description=__doc__)
    commands = parser.add_subparsers(dest="what", required=True)
    for name, (module, what, rounds) in COMMANDS.items():
        command = commands.add_parser(name, help=what, description=module.__doc__)
        if rounds is None:
            module.add_arguments(command)
        else:
            command.add_argument("--rounds", type=count, default=rounds, help=f"measurements of each kind ({rounds})")
    options = parser.parse_args()
    try:
        COMMANDS[options.what][0].main(options)
    except ValueError as error:
        raise SystemExit(f"{options.what}: {error}") from None


if __name__ == "__main__":
    main()
