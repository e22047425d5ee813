"""Times of several variants of the same work, taken in turns, so that what else the machine does meets all alike."""

import os
import random
import resource
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from scratch_ddp.common.agreement import message_device


@dataclass(frozen=True)
class Sample:
    """One round of one variant, in seconds; the largest over the ranks of each figure."""

    wall: float
    cpu: float  # user and system time of the process with all its threads, those of gloo included


@dataclass(frozen=True)
class Spread:
    """The median of some figures, and the quartiles around it."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3g} [{self.low:.3g}–{self.high:.3g}]"


def interleaved(
    variants: Mapping[str, Callable[[], object]],
    rounds: int = 20,
    warm_up: int = 3,
    group: dist.ProcessGroup | None = None,
) -> dict[str, list[Sample]]:
    """Run every variant once a round and return its samples, one a round, by the variant's name.

    Call it on every rank of `group` with the same variants; without a process group, this process is timed alone. The
    ranks begin each run together (a barrier, not timed), and a GPU's work is waited for. Each round has an order of its
    own: what ran before leaves its data in the caches, so no variant may always follow the same one. The first
    `warm_up` rounds are not kept. One all-reduce at the end.
    """
    names = list(variants)
    if not names or rounds < 1:
        raise ValueError(f"nothing to time: {len(names)} variants, {rounds} rounds")
    taken = torch.zeros(rounds, len(names), 2, dtype=torch.float64)
    for turn in range(-warm_up, rounds):
        for which in random.Random(turn + warm_up).sample(range(len(names)), len(names)):  # the same on every rank
            sample = _timed(variants[names[which]], group)
            if turn >= 0:
                taken[turn, which] = sample
    if dist.is_initialized():
        taken = taken.to(message_device(group))
        dist.all_reduce(taken, dist.ReduceOp.MAX, group=group)
    by_name = taken.transpose(0, 1).tolist()
    return {name: [Sample(*pair) for pair in pairs] for name, pairs in zip(names, by_name, strict=True)}


def ratio(samples: Sequence[Sample], reference: Sequence[Sample], figure: str = "wall") -> Spread:
    """How many times the reference's `figure` ("wall" or "cpu") the samples took, round by round."""
    return spread_of(
        [getattr(a, figure) / getattr(b, figure) for a, b in zip(samples, reference, strict=True)],
    )


def spread_of(figures: Sequence[float]) -> Spread:
    """Median and quartiles. One figure is its own quartiles."""
    if len(figures) == 1:
        return Spread(figures[0], figures[0], figures[0])
    low, _, high = statistics.quantiles(figures, n=4, method="inclusive")
    return Spread(statistics.median(figures), low, high)


def _timed(run: Callable[[], object], group: dist.ProcessGroup | None) -> torch.Tensor:
    if dist.is_initialized():
        dist.barrier(group=group)
    began, used = time.perf_counter(), _cpu_seconds()
    run()
    if torch.cuda.is_initialized():  # else nothing runs on a GPU, and to ask one would take it into use
        torch.cuda.synchronize()  # it is told what to do, and goes on while Python does
    return torch.tensor([time.perf_counter() - began, _cpu_seconds() - used], dtype=torch.float64)


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


# FOLDED: A table of what was measured beside what it must be.


@dataclass
class Figure:
    """One row: what was measured, the target, the result in words, and whether it meets the target."""

    what: str
    must: str
    measured: str
    holds: bool


def machine() -> str:
    """ "2 cores, load 0.3 at the start": where a measurement ran, and how busy it was in the minute before."""
    return f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start"


def markdown(figures: Iterable[Figure]) -> str:
    """The rows as a table of Markdown."""
    rows = ["| what | must | measured | |", "|---|---|---|---|"]
    rows += [f"| {row.what} | {row.must} | {row.measured} | {'✓' if row.holds else '✗'} |" for row in figures]
    return "\n".join(rows)


def spread(seconds: Sequence[float], unit: str = "s") -> str:
    """ "1.02 s (0.98–1.30)": median, smallest and largest."""
    scale = {"s": 1.0, "ms": 1e3}[unit]
    values = sorted(scale * second for second in seconds)
    return f"{statistics.median(values):.3g} {unit} ({values[0]:.3g}–{values[-1]:.3g})"


def three_digits(value: float) -> str:
    """Three significant digits, and no exponent for what is larger: "0.00324", "12.4", "2,090"."""
    return f"{value:.3g}" if abs(value) < 999.5 else f"{float(f'{value:.3g}'):,.0f}"
