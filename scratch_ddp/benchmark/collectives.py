"""All-reduces on ranks of this machine: times, bandwidths, and the α and β of their messages.

`collectives --ranks 2 4 6 --sizes 1KiB 1MiB 100MiB`
"""

import argparse

import torch

from scratch_ddp.benchmark import steps
from scratch_ddp.instruments.bandwidth import SIZES, measure
from scratch_ddp.instruments.forked_ranks import run_ranks
from scratch_ddp.instruments.timing import machine

HANGS = 3600.0  # seconds, longer than any measurement
LEGEND = (
    "Sizes: 1 MiB = 2^20 bytes, 1 MB = 10^6. Times: median [quartiles] over the samples, of the slowest rank. "
    "1 GB/s = 10^9 bytes per second, 1 GiB/s = 2^30. algbw = S/t, busbw = 2(n-1)/n·S/t as in nccl-tests; "
    "2·S/t is what the article published, in GiB/s, though it says GB/s."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.formatter_class = __doc__, argparse.RawDescriptionHelpFormatter
    parser.add_argument("--ranks", type=steps.count, nargs="+", default=[2, 4, 6], help="default: 2 4 6")
    parser.add_argument("--sizes", nargs="+", default=SIZES, metavar="SIZE", help=f"default: {' '.join(SIZES)}")
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo", help="nccl needs a GPU for each rank")
    parser.add_argument("--seconds", type=float, default=1.0, help="time per row, about (default: 1)")


def main(options: argparse.Namespace) -> None:
    print(f"Collectives on {machine()}, {options.backend}, torch {torch.__version__}.\n", flush=True)
    what = (options.sizes, options.ranks, options.seconds)
    found = run_ranks(max(options.ranks), measure, *what, backend=options.backend, timeout=HANGS)[0]
    fits, missing = found.fits()
    print(f"{found}\n\n{LEGEND}\n\nT = α + β·S by least squares of relative residuals:")
    for name, each in {**fits, **missing}.items():
        print(f"  {name}: {each}")
