"""Pipelines: a step against torch.distributed.pipelining; stages that sleep, against the simulated schedule."""

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.benchmark import steps
from scratch_ddp.benchmark.command import REPORTED, TableRow, cpu_row
from scratch_ddp.course.pages.sleeping import LiveActivations, SleepingStage
from scratch_ddp.instruments.forked_ranks import run_ranks
from scratch_ddp.instruments.timing import Sample, interleaved
from scratch_ddp.pipeline import Pipeline, bubble, execute, gpipe, held, one_f_one_b, simulate, zb_h1
from scratch_ddp.pipeline import interleaved as interleaved_1f1b
from scratch_ddp.pipeline.schedules import Schedule
from scratch_ddp.pipeline.simulate import Spans, homes

TORCHS = {  # our name: torch's class, stages of a rank, most of its CPU seconds, aim
    "gpipe": ("ScheduleGPipe", 1, 1.08, 1.00),
    "1f1b": ("Schedule1F1B", 1, 1.08, 1.00),
    "interleaved": ("ScheduleInterleaved1F1B", 2, 1.05, 0.95),
    "zb_h1": ("ScheduleInterleavedZeroBubble", 2, None, None),  # torch has no ZB-H1
}
MICRO, ROWS, TOKENS = 4, 1, 64  # micro-batches, and their sizes

RANKS, SLEEPS = 4, 8  # of the second half, with blocks of UNIT seconds
UNIT = 0.04
SLEEPING: dict[str, tuple[Schedule, float]] = {  # rows, seconds of a forward
    "GPipe": (gpipe(RANKS, SLEEPS), UNIT),
    "1F1B": (one_f_one_b(RANKS, SLEEPS), UNIT),
    "interleaved, 2 stages a rank": (interleaved_1f1b(RANKS, SLEEPS, 2), UNIT / 2),
    "ZB-H1": (zb_h1(RANKS, SLEEPS), UNIT),
}


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def measure(rounds: int, sizes: Mapping[str, Any]) -> dict[str, list[Sample]]:
    """On each rank: seconds of a step of every schedule, ours and torch's, on the same stages. Collective."""
    model = steps.build_llama(**sizes)
    x = torch.randint(steps.VOCABULARY, (MICRO * ROWS, TOKENS), generator=torch.Generator().manual_seed(1))
    variants: dict[str, Callable[[], object]] = {}
    for name, (torchs_name, laps, *_) in TORCHS.items():
        pipeline = Pipeline(model, MICRO, name, cross_entropy)
        variants[name] = partial(_step, pipeline, pipeline.step, x, x)
        if name == "zb_h1":
            two = Pipeline(model, MICRO, "interleaved", cross_entropy)  # the stages that torch's schedule needs
        stages = two if name == "zb_h1" else pipeline
        variants[torchs_name] = partial(_step, stages, _torchs(stages, torchs_name, laps, x))
    return interleaved(variants, rounds)


def _step(pipeline: Pipeline, run: Callable[..., object], *args: object, **kwargs: object) -> None:
    run(*args, **kwargs)
    pipeline.zero_grad()


class _Stage(nn.Module):
    def __init__(self, pipeline: Pipeline, stage: int):
        super().__init__()
        self.modules_of_all, self.call = pipeline.local_module, pipeline._stages[stage]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(x)


def _torchs(pipeline: Pipeline, name: str, laps: int, x: torch.Tensor) -> Callable[[], object]:
    """A step of torch's schedule of that name, on our stages."""
    from torch.distributed import pipelining

    rank, ranks = dist.get_rank(), dist.get_world_size()
    mine = [rank + lap * ranks for lap in range(laps)]
    stages = [
        pipelining.PipelineStage(_Stage(pipeline, stage), stage, laps * ranks, torch.device("cpu")) for stage in mine
    ]
    schedule = getattr(pipelining, name)(stages if laps > 1 else stages[0], n_microbatches=MICRO, loss_fn=cross_entropy)
    given = [x] if rank == 0 else []
    return partial(schedule.step, *given, **({"target": x} if rank == ranks - 1 else {}))


def step_rows(samples: dict[str, list[Sample]]) -> list[TableRow]:
    rows = []
    for name, (torchs_name, _, must, aim) in TORCHS.items():
        target = f"≤ {must:.2f} (aim {aim:.2f})" if must else REPORTED
        rows.append(cpu_row(f"{name} / torch's {torchs_name}", samples[name], samples[torchs_name], target, must))
    return rows


def sleep_through(rows: Schedule, unit: float, rounds: int) -> tuple[list[float], list[Sequence], int]:
    """On each rank: wall seconds of each round, the rank's spans, and the activations that were alive at most."""
    live, rank = LiveActivations(), dist.get_rank()
    stages = {stage: SleepingStage(unit, live=live) for stage, home in homes(rows).items() if home == rank}
    inputs, sizes, seconds, spans = [torch.ones(1, 4)] * SLEEPS, {}, [], []
    for turn in range(rounds + 1):
        dist.barrier()
        began = time.perf_counter()
        _, ran = execute(rows, stages, inputs, lambda _, y: y.sum(), sizes)
        if turn:  # the first one sends headers
            seconds.append(time.perf_counter() - began)
            spans.append(ran)
    return seconds, spans, live.most


def sleeping_rows(rounds: int) -> list[TableRow]:
    table = []
    for name, (rows, unit) in SLEEPING.items():
        found = run_ranks(RANKS, sleep_through, rows, unit, rounds, timeout=120)
        simulated = simulate(rows, {"F": unit, "B": 2 * unit, "I": unit, "W": unit})
        walls = [max(each) for each in zip(*(seconds for seconds, _, _ in found), strict=True)]
        bubbles = [bubble(each) for each in zip(*(spans for _, spans, _ in found), strict=True)]
        table += _sleeping(name, rows, simulated, walls, bubbles, [most for *_, most in found])
    return table


def _sleeping(
    name: str, rows: Schedule, simulated: Spans, walls: list[float], bubbles: list[float], most: list[int]
) -> list[TableRow]:
    must, aim = (1.03, 1.015) if max(homes(rows)) < RANKS else (1.05, 1.03)
    ratio = statistics.median(walls) / max(row[-1][2] for row in simulated)
    measured, formula = statistics.median(bubbles), bubble(simulated)
    expected = [held(row) for row in rows]
    return [
        TableRow(f"{name}: step / simulated", f"≤ {must} (aim {aim})", f"{ratio:.3f}", ratio <= must),
        TableRow(f"{name}: bubble", f"{formula:.3f} ± 0.02", f"{measured:.3f}", abs(measured - formula) <= 0.02),
        TableRow(f"{name}: activations held", " ".join(map(str, expected)), " ".join(map(str, most)), most == expected),
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    steps.add_arguments(parser, rounds=20, on_gpus=False)


def main(options: argparse.Namespace) -> int:
    return steps.run(options, "Pipelines of a Llama of 20 M parameters, 4 micro-batches", _measure)


def _measure(options: argparse.Namespace, _: str) -> tuple[list[TableRow], str]:
    import torch.distributed.pipelining  # noqa: F401 (takes seconds: once here, not in every rank)

    samples = steps.sample_on_ranks(options, measure, {"num_hidden_layers": 8})
    rows = step_rows(samples) + sleeping_rows(max(3, options.rounds // 3))
    return rows, steps.times_table(samples, "Schedule1F1B")
