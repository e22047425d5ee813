"""Pipelines: steps beside torch.distributed.pipelining; stages that sleep, beside the simulated schedule."""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining

from scratch_ddp.benchmark import steps
from scratch_ddp.course.pages.sleeping import SleepingStage
from scratch_ddp.instruments.timing import Sample, interleaved
from scratch_ddp.pipeline import Pipeline, execute, gpipe, one_f_one_b, simulate
from scratch_ddp.pipeline import interleaved as interleaved_1f1b
from scratch_ddp.pipeline.schedules import Schedule
from scratch_ddp.pipeline.simulate import homes

TORCHS = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B", "interleaved": "ScheduleInterleaved1F1B"}
MICRO, TOKENS = 4, 64  # micro-batches of one row each

SLEEPERS, SLEEPS, UNIT = 4, 8, 0.04  # of the second half: ranks, micro-batches, seconds of a forward
SLEEPING: dict[str, tuple[Schedule, float]] = {
    "GPipe": (gpipe(SLEEPERS, SLEEPS), UNIT),
    "1F1B": (one_f_one_b(SLEEPERS, SLEEPS), UNIT),
    "interleaved, two stages a rank": (interleaved_1f1b(SLEEPERS, SLEEPS, 2), UNIT / 2),
}


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def measure(rounds: int, sizes: dict[str, int]) -> dict[str, list[Sample]]:
    """On each rank: a step of every schedule, ours and torch's, on the same stages, in turns. Collective."""
    model = steps.build_llama(**sizes)
    ids = torch.randint(steps.VOCABULARY, (MICRO, TOKENS), generator=torch.Generator().manual_seed(1))
    variants: dict[str, Callable[[], object]] = {}
    for ours, torchs in TORCHS.items():
        pipeline = Pipeline(model, MICRO, ours, cross_entropy)
        for name, run in ((ours, partial(pipeline.step, ids, ids)), (torchs, _torchs(pipeline, torchs, ids))):
            variants[name] = partial(_step, pipeline, run)
    return interleaved(variants, rounds)


def _step(pipeline: Pipeline, run: Callable[[], object]) -> None:
    run()
    pipeline.zero_grad()


class _Stage(nn.Module):
    def __init__(self, pipeline: Pipeline, stage: int):
        super().__init__()
        self.modules_of_all, self.call = pipeline.local_module, pipeline._stages[stage]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(x)


def _torchs(pipeline: Pipeline, name: str, ids: torch.Tensor) -> Callable[[], object]:
    """A step of torch's schedule of that name, on our stages."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mine = list(pipeline._stages)
    count = len(mine) * ranks
    stages = [pipelining.PipelineStage(_Stage(pipeline, each), each, count, torch.device("cpu")) for each in mine]
    make = getattr(pipelining, name)
    schedule = make(stages if len(mine) > 1 else stages[0], n_microbatches=MICRO, loss_fn=cross_entropy)
    given, last = [ids] if rank == 0 else [], {"target": ids} if rank == ranks - 1 else {}
    return partial(schedule.step, *given, **last)


def sleep_through(rounds: int, rows: Schedule, unit: float) -> float:
    """On each rank: the median seconds of a schedule, whose slowest rank counts, after a first one with headers."""
    stages = {stage: SleepingStage(unit) for stage, home in homes(rows).items() if home == dist.get_rank()}
    inputs, sizes = [torch.ones(1, 4)] * SLEEPS, {}
    seconds = []
    for _ in range(rounds + 1):
        dist.barrier()
        began = time.perf_counter()
        execute(rows, stages, inputs, lambda _, y: y.sum(), sizes)
        took = torch.tensor(time.perf_counter() - began)
        dist.all_reduce(took, dist.ReduceOp.MAX)
        seconds.append(took.item())
    return statistics.median(seconds[1:])


def sleeping_rows(rounds: int) -> list[steps.Row]:
    """A row for each schedule: a step of stages that sleep, in units of the simulated one."""
    table = []
    for name, (rows, unit) in SLEEPING.items():
        taken = steps.on_ranks(SLEEPERS, sleep_through, rounds, rows, unit)
        simulated = max(row[-1][2] for row in simulate(rows, {"F": unit, "B": 2 * unit, "I": unit, "W": unit}))
        table.append((f"stages that sleep, {SLEEPERS} ranks, {name}: step / simulated", f"{taken / simulated:.3f}"))
    return table


def main(options: argparse.Namespace) -> None:
    steps.prepare("Pipelines of a Llama of 20 M parameters, 4 micro-batches")
    found = steps.on_ranks(2, measure, options.rounds, {"num_hidden_layers": 8})
    steps.show([*steps.beside(found, TORCHS.items()), *sleeping_rows(max(3, options.rounds // 3))])
