"""Steps of the data-parallel strategies against torch's DistributedDataParallel: CPU and wall seconds, in turns."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from scratch_ddp.benchmark import steps
from scratch_ddp.benchmark.command import TableRow, cpu_row
from scratch_ddp.ddp import BucketedDDP, FlatDDP, OverlappedDDP, SimpleDistributedDataParallelism
from scratch_ddp.instruments.timing import Sample, interleaved

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
    """How many times the CPU seconds of `reference` a step of BucketedDDP may take, and the aim."""

    reference: str
    must: float
    aim: float


TARGETS = (Target(REFERENCE, 1.00, 0.95), Target(BEST, 1.08, 1.00))


def measure(rounds: int, sizes: Mapping[str, Any], device_type: str = "cpu") -> dict[str, list[Sample]]:
    """On each rank: seconds of a step of every strategy's own replica. Collective; those of the slowest rank."""
    device = torch.device(device_type, torch.cuda.current_device()) if device_type == "cuda" else torch.device("cpu")
    batch = steps.make_batch(dist.get_rank(), device)
    models = {name: wrap(steps.build_llama(**sizes).to(device)) for name, wrap in WRAPPERS.items()}
    variants = {name: partial(steps.step, model, **batch) for name, model in models.items()}
    return interleaved(variants, rounds=rounds, warm_up=3)


def rows(samples: Mapping[str, Sequence[Sample]]) -> list[TableRow]:
    """BucketedDDP against torch's class: CPU seconds are judged, wall seconds reported."""
    return [
        cpu_row(
            f"{OURS} / {target.reference}, a step, {len(samples[OURS])} rounds",
            samples[OURS],
            samples[target.reference],
            f"≤ {target.must:.2f} (aim {target.aim:.2f})",
            target.must,
        )
        for target in TARGETS
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    steps.add_arguments(parser, rounds=40)


def main(options: argparse.Namespace) -> int:
    return steps.run(options, "Steps on a Llama of 16 M parameters", _measure)


def _measure(options: argparse.Namespace, device_type: str) -> tuple[list[TableRow], str]:
    samples = steps.sample_on_ranks(options, measure, {}, device_type)
    return rows(samples), steps.times_table(samples, REFERENCE)
