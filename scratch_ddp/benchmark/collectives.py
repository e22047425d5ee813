"""`python -m scratch_ddp.benchmark collectives`: time collectives on ranks of its own, or on those of torchrun.

python -m scratch_ddp.benchmark collectives --ranks 2 4 6 --sizes 1KiB 1MiB 100MiB
torchrun --nproc-per-node 2 -m scratch_ddp.benchmark collectives
"""

import argparse
import os
import sys

import torch
import torch.distributed as dist

from scratch_ddp.benchmark.command import positive_count, positive_seconds
from scratch_ddp.instruments.bandwidth import OPERATIONS, SIZES, Results, Row, measure, save_machine
from scratch_ddp.instruments.bandwidth.results import LEGEND
from scratch_ddp.instruments.forked_ranks import RankFailed, run_ranks
from scratch_ddp.instruments.sizes import parse_size
from scratch_ddp.instruments.timing import machine

RANKS = (2, 4, 6)
TIMEOUT = 3600.0  # seconds: for ranks that hang, longer than any measurement


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.formatter_class = __doc__, argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--ranks", type=positive_count, nargs="+", help="default: 2 4 6; under torchrun, all of its ranks"
    )
    parser.add_argument("--sizes", nargs="+", default=SIZES, metavar="SIZE", help=f"default: {' '.join(SIZES)}")
    parser.add_argument(
        "--operations",
        nargs="+",
        default=["all_reduce"],
        metavar="NAME",
        help=f"all, or any of: {', '.join(OPERATIONS)}",
    )
    parser.add_argument(
        "--backend", choices=("gloo", "nccl"), nargs="+", help="default: gloo, and NCCL if there are enough GPUs"
    )
    parser.add_argument("--seconds", type=positive_seconds, default=1.0, help="time per row, about (default: 1)")
    parser.add_argument("--save", action="store_true", help="save α and β in ./this_machine.json, for later lessons")


def main(options: argparse.Namespace) -> int:
    try:
        _check(options)
        found = _under_torchrun(options) if "TORCHELASTIC_RUN_ID" in os.environ else _on_own_ranks(options)
    except (ValueError, TypeError) as error:
        if _is_first():  # under torchrun all ranks raise alike
            print(f"collectives: {error}", file=sys.stderr)
        return 2
    except RankFailed as error:
        print(f"collectives: {error}", file=sys.stderr)
        return 1
    if found is not None:
        _report(found, options)
    return 0


def _is_first() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _check(options: argparse.Namespace) -> None:
    """Parse the options."""
    if options.operations == ["all"]:
        options.operations = list(OPERATIONS)
    options.sizes = [parse_size(size) for size in options.sizes]
    options.ranks = options.ranks and list(dict.fromkeys(options.ranks))


def _on_own_ranks(options: argparse.Namespace) -> Results:
    ranks = options.ranks or list(RANKS)
    print(f"Collectives on {machine()}, torch {torch.__version__}.", flush=True)
    found: tuple[Row, ...] = ()
    for backend, counts in _backends(options.backend, ranks, torch.cuda.device_count()).items():
        # All ranks answer alike: with the results, or with the error.
        answer = run_ranks(max(counts), _answer, options, counts, backend=backend, timeout=TIMEOUT)[0]
        if isinstance(answer, str):
            raise ValueError(answer)
        found += answer.rows
    return Results(found)


def _backends(wanted: list[str] | None, ranks: list[int], gpus: int) -> dict[str, list[int]]:
    """The numbers of ranks for each backend. Where NCCL lacks GPUs, refuse it if it is wanted, or leave it out."""
    if min(ranks) < 2:
        raise ValueError(f"--ranks {min(ranks)}: a collective is between 2 ranks or more")
    possible = [n for n in ranks if n <= gpus]
    lacking = [n for n in ranks if n > gpus]
    if wanted and "nccl" in wanted and lacking:
        raise ValueError(
            f"--backend nccl: {max(ranks)} ranks need a GPU each, and there are {gpus}. "
            + (f"Write --ranks {' '.join(map(str, possible))}, or" if possible else "Write")
            + " --backend gloo, which runs on the CPU."
        )
    if wanted:
        return dict.fromkeys(wanted, ranks)
    if lacking:
        print(f"No NCCL for {lacking} ranks: it wants a GPU for each, and there are {gpus}.")
    return {"gloo": ranks} | ({"nccl": possible} if possible else {})


def _answer(options: argparse.Namespace, counts: list[int] | None) -> Results | str:
    try:
        return measure(options.sizes, options.operations, counts, options.seconds)
    except (ValueError, TypeError) as error:
        return str(error)


def _under_torchrun(options: argparse.Namespace) -> Results | None:
    """Return the results on rank 0, None on the others. All ranks raise the same errors."""
    local_ranks, gpus = int(os.environ["LOCAL_WORLD_SIZE"]), torch.cuda.device_count()
    backend = (options.backend or ["nccl" if gpus >= local_ranks else "gloo"])[0]
    if len(options.backend or ()) > 1:
        raise ValueError("--backend: one at a time under torchrun")
    if backend == "nccl":
        if gpus < local_ranks:
            raise ValueError(f"--backend nccl: {local_ranks} ranks on this machine need a GPU each, and it has {gpus}")
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        torch.set_num_threads(1)
    dist.init_process_group(backend)
    try:
        answer = _answer(options, options.ranks)
        if isinstance(answer, str):
            raise ValueError(answer)
        return answer if dist.get_rank() == 0 else None
    finally:
        dist.destroy_process_group()


def _report(found: Results, options: argparse.Namespace) -> None:
    fits, missing = found.fits()
    print(f"\n{found}\n\n{LEGEND}\n\nT = α + β·S by least squares of relative residuals:")
    for name, each in {**fits, **missing}.items():
        print(f"  {name}: {each}")
    if options.save and fits:
        print(f"Kept in {save_machine(fits)}.")
