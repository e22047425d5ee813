"""Where a model is cut."""

import itertools
import random

import pytest

from scratch_ddp.pipeline import balanced_cuts


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


def test_fewer_layers_than_stages():
    with pytest.raises(ValueError, match="2 layers can't be cut into 3 stages"):
        balanced_cuts([1, 1], 3)
