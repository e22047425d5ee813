"""Lesson 08, the second exercise: what sticks out of a timeline."""

from itertools import pairwise

import torch

from scratch_ddp.course.exercise import Exercise
from scratch_ddp.course.trial import Trial


def exposed_time(compute, communication):
    """Seconds, a float (or 0), in which something is on the wire and the rank does not compute.

    Both are lists of up to 100 (start, end) in seconds, in any order, perhaps empty. An end may equal
    its start. Messages may overlap, and one may lie inside another; so may stretches of computing.
    Times may be negative, or large. Nothing is rounded but what float arithmetic rounds.
    Cost: nothing is sent.
    """
    # Between which moments does nothing begin or end?
    # answer: begin
    moments = sorted({moment for stretch in [*compute, *communication] for moment in stretch})
    exposed = 0.0
    for start, end in pairwise(moments):
        on_the_wire = any(a <= start and end <= b for a, b in communication)
        computing = any(a <= start and end <= b for a, b in compute)
        if on_the_wire and not computing:
            exposed += end - start
    return exposed
    # answer: end


_CASES = {  # case: (compute, communication, seconds)
    "a message after backward": ([(0.0, 4.0)], [(4.0, 7.0)], 3.0),
    "a message beside backward": ([(0.0, 4.0)], [(1.0, 3.0)], 0.0),
    "a tail": ([(0.0, 4.0)], [(1.0, 3.0), (3.0, 4.5)], 0.5),
    "a short tail": ([(0.0, 2048.0)], [(1024.0, 2048.0 + 2.0**-20)], 2.0**-20),
    "a gap in computing": ([(5.0, 6.0), (0.0, 2.0)], [(1.0, 5.5)], 3.0),
    "computing in two threads": ([(0.0, 3.0), (2.0, 5.0)], [(1.0, 6.0)], 1.0),
    "two messages at once": ([(0.0, 1.0)], [(0.5, 3.0), (2.0, 4.0)], 3.0),
    "more computing than messages": ([(0.0, 10.0)], [(9.0, 12.0)], 2.0),
    "nothing on the wire": ([(0.0, 4.0)], [], 0.0),
    "nothing computed": ([], [(1.0, 2.0)], 1.0),
    "nothing at all": ([], [], 0.0),
    "a message inside another": ([(4.0, 5.0)], [(0.0, 4.0), (1.0, 2.0)], 4.0),
    "computing inside other computing": ([(0.0, 4.0), (1.0, 2.0)], [(3.0, 5.0)], 1.0),
    "a message before all computing": ([(5.0, 6.0)], [(0.0, 3.0)], 3.0),
    "computing that ends together": ([(0.0, 5.0), (3.0, 5.0), (9.0, 10.0), (6.0, 10.0)], [(0.0, 12.0)], 3.0),
    "computing that begins together": ([(0.0, 5.0), (0.0, 2.0), (6.0, 7.0), (6.0, 10.0)], [(0.0, 12.0)], 3.0),
    "messages that end together": ([(20.0, 21.0)], [(0.0, 5.0), (3.0, 5.0), (9.0, 10.0), (6.0, 10.0)], 9.0),
    "messages that begin together": ([(20.0, 21.0)], [(0.0, 5.0), (0.0, 2.0), (6.0, 7.0), (6.0, 10.0)], 9.0),
    "no computing, and messages that overlap": ([], [(0.0, 2.0), (1.0, 3.0), (5.0, 9.0), (6.0, 7.0)], 7.0),
    "a message that joins two others": ([(20.0, 21.0)], [(0.0, 2.0), (3.0, 5.0), (1.0, 4.0)], 5.0),
    "computing that joins other computing": ([(0.0, 2.0), (3.0, 5.0), (1.0, 4.0)], [(0.0, 6.0)], 1.0),
    "100 messages that all overlap": ([(0.0, 1.0)], [(float(i), 200.0 - i % 7) for i in range(100)], 199.0),
    "computing that takes no time": ([(0.0, 0.0), (0.5, 0.5)], [(0.0, 1.0)], 1.0),
    "twelve of each, one inside another": (
        [(20.0 + i, 120.0 - i) for i in range(12)],
        [(float(i), 90.0 - i) for i in range(12)],
        20.0,
    ),
    "stretches that end at 0 or begin there": ([(-3.0, -2.0), (0.0, 1.0)], [(-4.0, 0.0), (0.0, 3.0)], 5.0),
    "computing that ends at 0": ([(-2.0, 0.0)], [(-3.0, 4.0)], 5.0),
    "messages that take no time": ([(0.0, 4.0)], [(5.0, 5.0), (1.0, 1.0)], 0.0),
}


def _drawn(generator: torch.Generator, number: int, hours: int, longest: int, lengths: int) -> tuple[list, list, int]:
    """`number` stretches each, and what `exposed_time` of them is, hour by hour. They begin and end on the hour.

    lengths: of an hour, at most. Every other one takes less than 10.
    """
    took = torch.randint(1, lengths + 1, (hours,), generator=generator)
    took[::2] = took[::2] % 10
    clock = [0, *took.cumsum(0).tolist()]

    def stretches() -> list[tuple[int, int]]:
        starts = torch.randint(0, hours - longest, (number,), generator=generator).tolist()
        lasting = torch.randint(0, longest + 1, (number,), generator=generator).tolist()
        return [(start, start + hours) for start, hours in zip(starts, lasting, strict=True)]

    by_hour = stretches(), stretches()
    compute, communication = ({hour for a, b in each for hour in range(a, b)} for each in by_hour)
    exposed = sum(clock[hour + 1] - clock[hour] for hour in communication - compute)
    return *([(clock[a], clock[b]) for a, b in each] for each in by_hour), exposed


def _each_counts(generator: torch.Generator, number: int) -> tuple[list, list, int]:
    """As `_drawn`, of `number` messages apart from one another: each has its own computing, which hides some of it."""
    communication, compute, exposed = [], [], 0
    draws = torch.randint(0, 60, (number,), generator=generator).tolist()
    for i, draw in enumerate(draws):
        start, end, busy = 10 * i + 1 + draw % 2, 10 * i + 6 + draw % 3, 10 * i + 1 + draw % 5  # 2 hours of computing
        communication.append((start, end))
        compute.append((busy, busy + 2))
        exposed += end - start - (min(end, busy + 2) - max(start, busy))
    order = torch.randperm(number, generator=generator).tolist()
    return [compute[i] for i in order], [communication[i] for i in reversed(order)], exposed


def examine_exposed_time(trial: Trial) -> None:
    """V on stretches whose ends are exact in binary, each rank with others; C: nothing is sent."""
    stretches = {case: (float(trial.rank + 1), 0.0, given) for case, given in _CASES.items()}
    generator = torch.Generator().manual_seed(trial.seed + trial.rank)
    for unit, began, drawn in (
        (2.0**-10, -0.01171875, (8, 40, 4, 1)),
        (2.0**-18, 2.0**30, (8, 40, 12, 2**16)),  # also sums of eight ends are exact
        (256.25, -5000.0, (8, 40, 20, 1)),
        (1024.0, -(2.0**59), (4, 20, 8, 1)),
        (1024.0, 2.0**59, (4, 20, 8, 1)),
        (2.0**-60, 0.0, (30, 60, 3, 2**36)),  # some hours take less than 1e-17 s, others more than float32 can add
    ):
        case = f"in units of {unit:g} s, from {began:g} s on, drawn with seed {trial.seed}"
        stretches[case] = unit, began, _drawn(generator, *drawn)
    for start in (0.0, 1.0):  # the middle is rounded to the start, or to the end
        case = f"a message as short as floats can tell, {start:g} of them after 2³⁰ s"
        stretches[case] = 2.0**-22, 2.0**30, ([], [(start, start + 1)], 1.0)
    stretches[f"100 messages, drawn with seed {trial.seed}"] = 0.125, 3.0, _each_counts(generator, 100)
    cases = {
        case: tuple([(began + unit * a, began + unit * b) for a, b in each] for each in given[:2])
        for case, (unit, began, given) in stretches.items()
    }
    for result, (unit, _, given) in zip(trial.call_each(cases), stretches.values(), strict=True):
        trial.value(result, unit * given[2])
    trial.cost(calls={})


EXPOSED_TIME = Exercise(
    exposed_time,
    examine_exposed_time,
    given="from itertools import pairwise",
    also_named=("exposed_seconds",),
)
EXERCISES = (EXPOSED_TIME,)
