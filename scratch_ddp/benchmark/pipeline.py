"""Pipelines of a Llama of 20 M parameters beside torch's; stages that sleep, beside the simulated schedule."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining

from scratch_ddp.benchmark import steps
from scratch_ddp.course.pages.sleeping import SleepingStage
from scratch_ddp.instruments.timing import Sample, interleaved, spread_of
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


def measure(rounds: int, sizes: dict[str, int]) -> dict[str, list[Sample]]:
    """On each rank: a step of every schedule, ours and torch's, on the same stages, in turns. Collective."""
    model = steps.build_llama(**sizes)
    ids = torch.randint(steps.VOCABULARY, (MICRO, TOKENS), generator=torch.Generator().manual_seed(1))
    variants: dict[str, Callable[[], object]] = {}
    for ours, torchs in TORCHS.items():
        pipeline = Pipeline(model, MICRO, ours, steps.token_loss)
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
    settings = {"n_microbatches": MICRO, "loss_fn": steps.token_loss}
    schedule = getattr(pipelining, name)(stages if len(mine) > 1 else stages[0], **settings)
    given, last = [ids] if rank == 0 else [], {"target": ids} if rank == ranks - 1 else {}
    return partial(schedule.step, *given, **last)


def sleep_through(rounds: int, schedule: Schedule, unit: float) -> float:
    """On each rank: the median seconds of a schedule, whose slowest rank counts, after a first one with headers."""
    stages = {stage: SleepingStage(unit) for stage, home in homes(schedule).items() if home == dist.get_rank()}
    run = partial(execute, schedule, stages, [torch.ones(1, 4)] * SLEEPS, lambda _, y: y.sum(), sizes={})
    return spread_of([each.wall for each in interleaved({"": run}, rounds, warm_up=1)[""]]).median


def rows(rounds: int) -> Iterator[steps.Row]:
    yield from steps.beside(steps.on_ranks(2, measure, rounds, {"num_hidden_layers": 8}), TORCHS.items())
    for name, (schedule, unit) in SLEEPING.items():
        taken = steps.on_ranks(SLEEPERS, sleep_through, max(3, rounds // 3), schedule, unit)
        simulated = max(row[-1][2] for row in simulate(schedule, {"F": unit, "B": 2 * unit, "I": unit, "W": unit}))
        yield f"stages that sleep, {SLEEPERS} ranks, {name}: step / simulated", f"{taken / simulated:.3f}"
