"""What a step costs by formula, against steps worked out by hand, and a search over bucket sizes."""

import math

import pytest
import torch
from torch import nn

from scratch_ddp.common.tensors import MB
from scratch_ddp.instruments import cost
from scratch_ddp.instruments.cost import Backward, Link, best_bucket, best_bucket_bytes, bucketed
from scratch_ddp.pipeline import one_f_one_b, zb_h1

EVEN = Backward(ready=(1, 2, 3, 4), nbytes=(10, 10, 10, 10), seconds=5, forward=2)


def spans(forecast):
    return [(each.started, each.ended) for each in forecast.all_reduces]


def test_messages_queue_for_the_wire():
    quick, slow = Link(0.5, 0).wire(2), Link(1.5, 0).wire(2)
    assert spans(cost.per_parameter(EVEN, quick)) == [(1, 1.5), (2, 2.5), (3, 3.5), (4, 4.5)]
    assert cost.per_parameter(EVEN, quick).exposed == 0
    assert cost.naive(EVEN, Link(0.5, 0.01).wire(2)).exposed == pytest.approx(4 * 0.5 + 0.01 * 40)
    late = cost.per_parameter(EVEN, slow)
    assert spans(late) == [(1, 2.5), (2.5, 4), (4, 5.5), (5.5, 7)] and (late.exposed, late.step) == (2, 9)
    tens, wire = Backward.in_proportion([MB] * 4, 4.0), Link(0, 1 / MB).wire(2)
    assert spans(bucketed(tens, wire, bucket_mb=2, first_mb=1)) == [(1, 2), (3, 5), (5, 6)]
    assert bucketed(tens, wire, bucket_mb=0.5).calls == 4  # the first is no larger than the others
    assert spans(bucketed(tens, wire, math.inf, math.inf)) == spans(cost.flat(tens, wire)) == [(4, 8)]


def test_a_measured_backward():
    model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 3))
    model[0].bias.requires_grad_(False)
    backward = Backward.measured(model, lambda: model(torch.randn(8, 64)).sum())
    weights = {model[0].weight.nbytes, model[1].weight.nbytes, model[1].bias.nbytes}
    assert set(backward.nbytes) == weights and backward.nbytes[-1] == model[0].weight.nbytes
    assert 0 < backward.ready[0] <= backward.ready[-1] <= backward.seconds and backward.forward > 0


@pytest.mark.parametrize("alpha, all_bytes", [(0.001, 2.0), (0.001, 1.0), (0.01, 0.5), (1e-4, 0.999)])  # seconds
def test_the_formula_is_the_best_size_of_the_queue(alpha, all_bytes):
    """4000 gradients that arrive evenly in a second: no size ends sooner than the formula's; the search finds it."""
    backward = Backward.in_proportion([MB // 4] * 4000, 1.0)
    wire = Link(alpha, all_bytes / backward.total_bytes).wire(2)
    best = best_bucket_bytes(wire, backward.total_bytes, 1.0) / MB
    step = bucketed(backward, wire, best, first_mb=best).step
    for size in (best * factor for factor in (0.25, 0.5, 0.8, 1.25, 2, 4)):
        assert size > 1000 or bucketed(backward, wire, size, first_mb=size).step > 0.9999 * step
    size, forecast = best_bucket(backward, wire, first_mb=1000)
    assert forecast.step <= 1.003 * step and 0.8 < size / best < 2.1  # the largest of those that are as good


def test_pipelines():
    assert cost.pipelined(zb_h1(4, 8), 1, 2, 1000, Link(0, 0).wire(2)) == 3 * 8 + 4 - 1
    # One micro-batch on two ranks: forward, message, forward, backward, message, backward.
    slow = Link(0.5, 0.001, per_round=0.25).wire(2)
    assert cost.pipelined(one_f_one_b(2, 1), 1, 2, 1000, slow) == 2 * 1 + 2 * 2 + 2 * 1.75
