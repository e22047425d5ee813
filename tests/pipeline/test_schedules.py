"""Schedules as data: generators, simulation against the formulas, what is refused; and where a model is cut."""

import itertools
import random

import pytest

from scratch_ddp.pipeline import (
    Action,
    bubble,
    gpipe,
    held,
    interleaved,
    one_f_one_b,
    simulate,
    validate,
    zb_h1,
)
from scratch_ddp.pipeline.module import SCHEDULES
from scratch_ddp.pipeline.split import balanced_cuts

SIZES = [(1, 1), (1, 4), (2, 1), (2, 3), (4, 2), (4, 8), (5, 5), (8, 16)]


def makespan(rows, cost) -> float:
    return max(row[-1][2] for row in simulate(rows, cost))


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_units_and_activations_of_every_schedule(p, m):
    whole, halves = {"F": 1, "B": 2}, {"F": 1, "I": 1, "W": 1}
    assert makespan(gpipe(p, m), whole) == makespan(one_f_one_b(p, m), whole) == 3 * (m + p - 1)
    assert [held(row) for row in gpipe(p, m)] == [m] * p
    assert [held(row) for row in one_f_one_b(p, m)] == [min(m, p - r) for r in range(p)]
    assert bubble(simulate(one_f_one_b(p, m), whole)) == pytest.approx((p - 1) / (m + p - 1))
    assert makespan(zb_h1(p, m), halves) <= (3 * m + p - 1 if m >= p else 3 * (m + p - 1))
    assert max(held(row) for row in zb_h1(p, m)) <= p
    if m % p == 0:
        for v in (1, 2, 3):
            rows = interleaved(p, m, v)
            assert makespan(rows, {"F": 1 / v, "B": 2 / v}) == pytest.approx(3 * (m + (p - 1) / v))
    for name, make in SCHEDULES.items():
        if name != "interleaved" or m % p == 0:
            validate(make(p, m), m)


def test_messages_take_time_between_ranks_only():
    rows = [[Action(kind, stage, 0) for kind in "FB" for stage in (0, 1)]]
    rows = [[*rows[0][:2], rows[0][3], rows[0][2]]]
    assert makespan(rows, {"F": 1, "B": 2}) == max(row[-1][2] for row in simulate(rows, hop=5.0)) == 6
    assert max(row[-1][2] for row in simulate(one_f_one_b(2, 1), hop=5.0)) == 16


def f(stage, micro, kind="F"):
    return Action(kind, stage, micro)


def b(stage, micro):
    return Action("B", stage, micro)


WRONG = {
    "B0 of stage 0 is missing": [[f(0, 0)]],
    "F0 of stage 0 is there 2 times": [[f(0, 0), f(0, 0), b(0, 0)]],
    "B0 of stage 0 does not belong": [[f(0, 0), f(0, 0, "I"), f(0, 0, "W"), b(0, 0)]],  # whole and halved
    "W0 of stage 0 is missing": [[f(0, 0), f(0, 0, "I")]],
    "F1 of stage 0 does not belong": [[f(0, 0), b(0, 0), f(0, 1), b(0, 1)]],
    "stage 0 must be on one rank, and is on ranks 0, 1": [[f(0, 0)], [b(0, 0)]],
    "B0 of stage 1 is missing": [[f(0, 0), b(0, 0)], [f(2, 0), b(2, 0)]],
    "deadlocks: rank 0, at F0 of stage 2, waits for the output of stage 1 for micro-batch 0; "
    "rank 1, at F0 of stage 1, waits for the output of stage 0 for micro-batch 0": [
        [f(2, 0), f(0, 0), b(2, 0), b(0, 0)],
        [f(1, 0), b(1, 0)],
    ],
}


@pytest.mark.parametrize("message", WRONG)
def test_what_is_refused(message):
    with pytest.raises(ValueError, match=message):
        validate(WRONG[message], 1)


def test_interleaving_needs_a_multiple_of_the_ranks():
    with pytest.raises(ValueError, match="a multiple of 4 micro-batches on 4 ranks, not 6"):
        interleaved(4, 6, 2)


def costliest(costs, cuts) -> float:
    ends = [0, *cuts, len(costs)]
    return max(sum(costs[start:end]) for start, end in itertools.pairwise(ends))


def test_no_other_cut_is_better():
    draw = random.Random(0)
    for _ in range(50):
        costs = [draw.choice([0, 1, 2, 3.5, 9]) for _ in range(draw.randint(1, 8))]
        for stages in range(1, len(costs) + 1):
            cuts = balanced_cuts(costs, stages)
            others = itertools.combinations(range(1, len(costs)), stages - 1)
            assert sorted(set(cuts)) == cuts and len(cuts) == stages - 1
            assert costliest(costs, cuts) == min(costliest(costs, other) for other in others)
