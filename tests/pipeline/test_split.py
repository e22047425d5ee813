"""Where a model is cut."""

import itertools
import random

import pytest
import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.course.pages.sleeping import SleepingStage
from scratch_ddp.pipeline import balanced_cuts, layer_seconds
from tests.pipeline.cases import pipeline_of
from tests.ranks import run_ranks


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


def by_parameters_and_by_time() -> tuple[list[str], list[str]]:
    torch.manual_seed(0)
    layers = [nn.Embedding(50, 4), SleepingStage(0.0), *(SleepingStage(0.01) for _ in range(4))]
    seconds = layer_seconds(layers, torch.arange(3))
    shared = [None, None]
    dist.all_gather_object(shared, seconds)
    assert shared[0] == shared[1] and all(each.grad is None for layer in layers for each in layer.parameters())
    assert all(each < 0.01 for each in seconds[:2]) and all(each >= 0.02 for each in seconds[2:]), seconds
    for each in layers[1:]:
        each.linear.weight._backward_hooks = None  # so that it can be copied
    plain = nn.ModuleList([layers[0], *(each.linear for each in layers[1:])])
    pipelines = [pipeline_of(plain, 2), pipeline_of(plain, 2, costs=seconds)]
    return tuple([name for name, _ in each.named_parameters()] for each in pipelines)


def test_by_parameters_or_by_measured_times():
    (few, many), (rest, later) = run_ranks(2, by_parameters_and_by_time)
    assert few == ["0.weight"] and rest == [f"{i}.weight" for i in range(1, 6)]
    assert many == [f"{i}.weight" for i in range(4)] and later == ["4.weight", "5.weight"]
