"""All-reduces on ranks of this machine, or on torchrun's: times, bandwidths, and the α and β of their messages.

`collectives --ranks 2 4 6 --sizes 1KiB 1MiB 100MiB`
"""

import argparse
import os
from functools import partial

import torch
import torch.distributed as dist

from scratch_ddp.instruments.bandwidth import SIZES, measure
from scratch_ddp.instruments.forked_ranks import run_ranks
from scratch_ddp.instruments.sizes import count, parse_size
from scratch_ddp.instruments.timing import machine
from scratch_ddp.training.__main__ import choose_device

HANGS = 3600.0  # seconds, longer than any measurement
LEGEND = (
    "1 MiB = 2^20 bytes, 1 MB = 10^6. Times: median [quartiles] of the slowest rank. algbw = S/t, busbw = 2(n-1)/n·S/t "
    "as in nccl-tests; 2·S/t is what the article published, in GiB/s, though it says GB/s."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=count, nargs="+", default=[2, 4, 6], help="default: 2 4 6")
    parser.add_argument("--sizes", type=parse_size, nargs="+", default=SIZES, help=f"default: {' '.join(SIZES)}")
    parser.add_argument("--seconds", type=float, default=1.0, help="time per row, about (default: 1)")


def main(options: argparse.Namespace) -> None:
    what = {"sizes": options.sizes, "seconds": options.seconds}
    if "RANK" in os.environ:  # torchrun has started the ranks, maybe on several hosts
        dist.init_process_group("nccl" if choose_device(None).type == "cuda" else "gloo")
        found, is_first = measure(**what), dist.get_rank() == 0
        dist.destroy_process_group()
        if not is_first:
            return
    else:
        on_each = partial(measure, ranks=options.ranks, **what)
        found = run_ranks(max(options.ranks), on_each, timeout=HANGS)[0]
    print(f"All-reduces on {machine()}, torch {torch.__version__}.\n")
    fits, missing = found.fits()
    print(f"{found}\n\n{LEGEND}\n\nT = α + β·S by least squares of relative residuals:")
    for name, each in {**fits, **missing}.items():
        print(f"  {name}: {each}")
