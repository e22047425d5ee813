"""Steps of the data-parallel strategies beside torch's DistributedDataParallel: CPU and wall seconds, in turns."""

import argparse
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from scratch_ddp.benchmark import options as step_options
from scratch_ddp.benchmark.options import build_llama, make_batch
from scratch_ddp.ddp import BucketedDDP, FlatDDP, OverlappedDDP, SimpleDistributedDataParallelism
from scratch_ddp.instruments.forked_ranks import run_ranks
from scratch_ddp.instruments.timing import Figure, Sample, interleaved, machine, markdown, ratio

REFERENCE, BEST, OURS = "torch DDP", "torch DDP at its best", "BucketedDDP"
WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    REFERENCE: DistributedDataParallel,
    BEST: partial(DistributedDataParallel, gradient_as_bucket_view=True, static_graph=True),
    "SimpleDistributedDataParallelism": SimpleDistributedDataParallelism,
    "FlatDDP": FlatDDP,
    "OverlappedDDP": OverlappedDDP,
    OURS: BucketedDDP,
    "no synchronisation": lambda model: model,
}


@dataclass(frozen=True)
class Target:
    """How many times the CPU seconds of `beside` a step of BucketedDDP may take, and what is aimed at."""

    beside: str
    must: float
    aim: float


TARGETS = (Target(REFERENCE, 1.00, 0.95), Target(BEST, 1.08, 1.00))


def steps(sizes: Mapping[str, Any], device: torch.device) -> dict[str, Callable[[], None]]:
    """For each strategy a step of its own replica: forward, backward, synchronisation; no optimizer. Collective."""
    batch = {name: each.to(device) for name, each in make_batch(dist.get_rank()).items()}

    def step(model: nn.Module) -> None:
        model(**batch).loss.backward()
        getattr(model, "sync_gradients", lambda: None)()  # torch's has no need of it
        model.zero_grad()

    return {name: partial(step, wrap(build_llama(**sizes).to(device))) for name, wrap in WRAPPERS.items()}


def measure(rounds: int, sizes: Mapping[str, Any], device_type: str = "cpu") -> dict[str, list[Sample]]:
    """On each rank: seconds of all strategies' steps. The same on every rank: the slowest one's."""
    device = torch.device(device_type, torch.cuda.current_device()) if device_type == "cuda" else torch.device("cpu")
    return interleaved(steps(sizes, device), rounds=rounds, warm_up=3)


def table(samples: Mapping[str, Sequence[Sample]]) -> str:
    """All strategies as Markdown: medians, and their ratios to torch DDP with the quartiles."""
    rows = ["| strategy | CPU / torch DDP | wall / torch DDP | CPU ms | wall ms |", "|---|---|---|---|---|"]
    for name, each in samples.items():
        ratios = [str(ratio(each, samples[REFERENCE], figure)) for figure in ("cpu", "wall")]
        medians = [f"{1e3 * statistics.median(getattr(one, figure) for one in each):.0f}" for figure in ("cpu", "wall")]
        rows.append(f"| {' | '.join([name, *ratios, *medians])} |")
    return "\n".join(rows)


def figures(samples: Mapping[str, Sequence[Sample]]) -> list[Figure]:
    """BucketedDDP beside torch's: CPU seconds are judged, wall seconds said."""
    rows = []
    for target in TARGETS:
        cpu, wall = (ratio(samples[OURS], samples[target.beside], figure) for figure in ("cpu", "wall"))
        what = f"{OURS} / {target.beside}, a step, {len(samples[OURS])} rounds"
        must = f"≤ {target.must:.2f} (aim {target.aim:.2f})"
        rows.append(Figure(what, must, f"{cpu} of the CPU time, {wall} of the time", cpu.median <= target.must))
    return rows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    step_options.add_arguments(parser, rounds=40)
    step_options.add_backend(parser)


def main(options: argparse.Namespace) -> int:
    if problem := step_options.problem(options):
        print(problem, file=sys.stderr)
        return 2
    device_type = "cuda" if options.backend == "nccl" else "cpu"
    print(f"Steps on a Llama of 16 M parameters, {options.ranks} ranks, {options.backend}, {machine()}.\n", flush=True)
    step_options.import_early()
    timeout = 60 + 30.0 * options.rounds
    samples, *_ = run_ranks(
        options.ranks, measure, options.rounds, {}, device_type, backend=options.backend, timeout=timeout
    )
    rows = figures(samples)
    print(table(samples), markdown(rows), sep="\n\n")
    return 0 if all(row.holds for row in rows) else 1
