"""`python -m scratch_ddp.benchmark collectives`: time collectives on ranks of its own, or on those of torchrun.

python -m scratch_ddp.benchmark collectives --ranks 2 4 6 --sizes 1KiB 1MiB 100MiB
torchrun --nproc-per-node 2 -m scratch_ddp.benchmark collectives
"""

import argparse
import os

import torch
import torch.distributed as dist

from scratch_ddp.benchmark.steps import count
from scratch_ddp.instruments.bandwidth import OPERATIONS, SIZES, Results, measure, save_machine
from scratch_ddp.instruments.bandwidth.results import LEGEND
from scratch_ddp.instruments.forked_ranks import run_ranks
from scratch_ddp.instruments.timing import machine

HANGS = 3600.0  # seconds, longer than any measurement


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.formatter_class = __doc__, argparse.RawDescriptionHelpFormatter
    parser.add_argument("--ranks", type=count, nargs="+", help="default: 2 4 6; under torchrun, all of its ranks")
    parser.add_argument("--sizes", nargs="+", default=SIZES, metavar="SIZE", help=f"default: {' '.join(SIZES)}")
    operations = f"default: all_reduce; any of: {', '.join(OPERATIONS)}"
    parser.add_argument("--operations", nargs="+", default=["all_reduce"], choices=OPERATIONS, help=operations)
    parser.add_argument("--backend", choices=("gloo", "nccl"), help="default: NCCL if each rank has a GPU, else gloo")
    parser.add_argument("--seconds", type=float, default=1.0, help="time per row, about (default: 1)")
    parser.add_argument("--save", action="store_true", help="save α and β in ./this_machine.json, for later lessons")


def main(options: argparse.Namespace) -> None:
    """Measure and print, once. Raises ValueError for what can't be measured, under torchrun on every rank."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        found = _under_torchrun(options)
    else:
        ranks = options.ranks or [2, 4, 6]
        backend = _backend(options, max(ranks))
        print(f"Collectives on {machine()}, {backend}, torch {torch.__version__}.\n", flush=True)
        found = run_ranks(max(ranks), _measure, options, ranks, backend=backend, timeout=HANGS)[0]
    if found is not None:
        _report(found, options)


def _backend(options: argparse.Namespace, ranks: int) -> str:
    gpus = torch.cuda.device_count()
    if options.backend == "nccl" and gpus < ranks:
        raise ValueError(f"--backend nccl: {ranks} ranks of this machine need a GPU each, and it has {gpus}")
    return options.backend or ("nccl" if gpus >= ranks else "gloo")


def _measure(options: argparse.Namespace, ranks: list[int] | None) -> Results:
    return measure(options.sizes, options.operations, ranks, options.seconds)


def _under_torchrun(options: argparse.Namespace) -> Results | None:
    """The results on rank 0, None on the others."""
    backend = _backend(options, int(os.environ["LOCAL_WORLD_SIZE"]))
    if backend == "nccl":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        torch.set_num_threads(1)
    dist.init_process_group(backend)
    try:
        found = _measure(options, options.ranks)
        return found if dist.get_rank() == 0 else None
    finally:
        dist.destroy_process_group()


def _report(found: Results, options: argparse.Namespace) -> None:
    fits, missing = found.fits()
    print(f"{found}\n\n{LEGEND}\n\nT = α + β·S by least squares of relative residuals:")
    for name, each in {**fits, **missing}.items():
        print(f"  {name}: {each}")
    if options.save and fits:
        print(f"Kept in {save_machine(fits)}.")
