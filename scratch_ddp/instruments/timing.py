"""Timing several variants of the same work in turns, so that other load on the machine affects all of them alike."""

import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from scratch_ddp.common.agreement import message_device


@dataclass(frozen=True)
class Sample:
    """One round of one variant, in seconds. Each figure is the largest over the ranks."""

    wall: float
    cpu: float  # user and system time of the process with all its threads, including gloo's


@dataclass(frozen=True)
class Spread:
    """The median of some figures, and their quartiles."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3g} [{self.low:.3g}–{self.high:.3g}]"


def interleaved(
    variants: Mapping[str, Callable[[], object]], rounds: int, warm_up: int = 3, group: dist.ProcessGroup | None = None
) -> dict[str, list[Sample]]:
    """Run every variant once per round, and return its samples, one per round, by the variant's name.

    Call it on every rank of `group` with the same variants; without a process group, this process is timed alone. The
    ranks start each run together, and a GPU's work is waited for. Each round has its own order, since a variant finds
    the data of the one before it in the caches. The first `warm_up` rounds are dropped. Costs an all-reduce at the end.
    """
    names = list(variants)
    taken = torch.zeros(warm_up + rounds, len(names), 2, dtype=torch.float64)
    for turn in range(len(taken)):
        for which in random.Random(turn).sample(range(len(names)), len(names)):  # the same on every rank
            taken[turn, which] = _timed(variants[names[which]], group)
    if dist.is_initialized():
        taken = taken.to(message_device(group))
        dist.all_reduce(taken, dist.ReduceOp.MAX, group=group)
    by_name = taken[warm_up:].transpose(0, 1).tolist()
    return {name: [Sample(*pair) for pair in pairs] for name, pairs in zip(names, by_name, strict=True)}


def ratio(samples: Sequence[Sample], reference: Sequence[Sample], figure: str = "wall") -> Spread:
    """The samples' `figure` ("wall" or "cpu") divided by the reference's, round by round."""
    return spread_of([getattr(a, figure) / getattr(b, figure) for a, b in zip(samples, reference, strict=True)])


def spread_of(figures: Sequence[float]) -> Spread:
    """Median and quartiles. One figure is its own quartiles."""
    return Spread(*np.quantile(figures, (0.5, 0.25, 0.75)).tolist())


def _timed(run: Callable[[], object], group: dist.ProcessGroup | None) -> torch.Tensor:
    if dist.is_initialized():
        dist.barrier(group=group)
    began, used = time.perf_counter(), time.process_time()
    run()
    if torch.cuda.is_initialized():  # otherwise nothing runs on a GPU, and synchronize would initialize it
        torch.cuda.synchronize()  # a GPU's calls return before its work is done
    return torch.tensor([time.perf_counter() - began, time.process_time() - used], dtype=torch.float64)


def machine() -> str:
    """ "2 cores, load 0.3 at the start": where a measurement ran, and how busy the machine was in the minute before."""
    return f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start"
