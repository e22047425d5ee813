"""What a message, a collective and a step cost by formula, against numbers worked out by hand and torch's own rule."""

import math
import random

import pytest
import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.common.tensors import MB
from scratch_ddp.ddp.bucketed import bucket_plan
from scratch_ddp.instruments import cost
from scratch_ddp.instruments.cost import Backward, Wire

EVEN = Backward(ready=(1, 2, 3, 4), nbytes=(10, 10, 10, 10), seconds=5, forward=2)


def spans(forecast):
    return [(each.started, each.ended) for each in forecast.all_reduces]


def test_alpha_and_beta():
    assert cost.transfer_seconds(0.5, 0.001, 3, 2000) == 3.5
    assert Wire(0.5, 0.001, 2).all_reduce(1000) == 1.5  # two ranks send as many bytes as they sum
    assert Wire(0.5, 0.001, 4).all_reduce(1000) == 2.0  # four: 2·3/4
    assert Wire(0.5, 0.001, 4, per_round=0.1).all_reduce(1000) == pytest.approx(2.6)  # 6 rounds
    assert Wire(0.5, 0.001, 1).all_reduce(1000) == 0


@pytest.mark.parametrize("bad", [-1, math.inf, -math.inf, math.nan, "1", None])
@pytest.mark.parametrize("name", ["alpha", "beta", "calls", "nbytes"])
def test_a_bad_figure_is_named(name, bad):
    figures = {"alpha": 1, "beta": 1, "calls": 1, "nbytes": 1} | {name: bad}
    with pytest.raises(ValueError, match=f"{name} must be a finite number, 0 or more, not {bad!r}"):
        cost.transfer_seconds(**figures)
    if name in ("alpha", "beta"):
        with pytest.raises(ValueError, match=name):
            Wire(figures["alpha"], figures["beta"], 2)


@pytest.mark.parametrize("world_size", [0, -1, 1.5, "2"])
def test_a_wire_needs_ranks(world_size):
    with pytest.raises(ValueError, match="world_size must be a whole number"):
        Wire(0, 0, world_size)


@pytest.mark.parametrize(
    ("figures", "message"),
    [
        (((1, 2), (4,), 3), "2 gradients are ready, but 1 sizes"),
        (((2, 1), (4, 4), 3), "in the order in which they are ready"),
        (((1, 4), (4, 4), 3), "ready after 4 s of a backward of 3 s"),
        (((1, math.nan), (4, 4), 3), "ready must be"),
        (((1, 2), (4, -4), 3), "nbytes must be"),
        (((1, 2), (4, 4), math.inf), "seconds must be"),
        (((1, 2), (4, 4), 3, -1), "forward must be"),
    ],
)
def test_a_backward_that_can_not_be(figures, message):
    with pytest.raises(ValueError, match=message):
        Backward(*figures)


def test_steps_after_the_backward():
    wire = Wire(0.5, 0.01, 2)
    naive, flat = cost.naive(EVEN, wire), cost.flat(EVEN, wire)
    assert naive.exposed == pytest.approx(4 * 0.5 + 0.01 * 40) and naive.calls == 4
    assert flat.exposed == pytest.approx(0.5 + 0.01 * 40) and flat.calls == 1
    assert naive.step == 7 + naive.exposed and naive.hidden == pytest.approx(0)


def test_messages_queue_for_the_wire():
    quick, slow = Wire(0.5, 0, 2), Wire(1.5, 0, 2)
    assert spans(cost.per_parameter(EVEN, quick)) == [(1, 1.5), (2, 2.5), (3, 3.5), (4, 4.5)]
    assert cost.per_parameter(EVEN, quick).exposed == 0
    late = cost.per_parameter(EVEN, slow)
    assert spans(late) == [(1, 2.5), (2.5, 4), (4, 5.5), (5.5, 7)]
    assert (late.exposed, late.hidden, late.step) == (2, 4, 9)
    assert [each.posted for each in late.all_reduces] == [1, 2, 3, 4]


def test_buckets_close_when_they_are_full():
    tens = Backward.in_proportion([MB] * 4, 4.0)
    wire = Wire(0, 1 / MB, 2)
    assert spans(cost.bucketed(tens, wire, bucket_mb=2, first_mb=1)) == [(1, 2), (3, 5), (5, 6)]
    assert spans(cost.bucketed(tens, wire, bucket_mb=2, first_mb=2)) == [(2, 4), (4, 6)]
    assert cost.bucketed(tens, wire, bucket_mb=0.5).calls == 4  # no gradient is cut, and the first is no larger
    whole = cost.bucketed(tens, wire, bucket_mb=1000, first_mb=1000)
    assert whole.step == cost.flat(tens, wire).step


@pytest.mark.parametrize("sizes", [(0, 1), (-1, 1), (math.nan, 1), ("25", 1), (25, 0), (25, -1), (25, math.nan)])
def test_buckets_that_hold_nothing(sizes):
    with pytest.raises(ValueError, match="_mb must be"):
        cost.bucketed(EVEN, Wire(0, 0, 2), *sizes)


def test_a_model_without_parameters():
    nothing = Backward((), (), 3, 1)
    for strategy in (cost.naive, cost.flat, cost.per_parameter, cost.bucketed):
        assert strategy(nothing, Wire(1, 1, 2)).step == 4 and strategy(nothing, Wire(1, 1, 2)).calls == 0
    with pytest.raises(ValueError, match="no gradient"):
        cost.best_bucket(nothing, Wire(1, 1, 2))


def test_buckets_are_those_of_torchs_ddp():
    chance = random.Random(0)
    for _ in range(50):
        elements = [chance.randint(1, 400) for _ in range(chance.randint(1, 40))]
        limit, first = chance.randint(4, 3000), chance.randint(4, 1000)
        theirs, _ = dist._compute_bucket_assignment_by_size([torch.empty(n) for n in elements], [first, limit])
        assert bucket_plan([4 * n for n in elements], limit, first) == theirs


def test_a_measured_backward():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 3))
    model[0].bias.requires_grad_(False)
    x = torch.randn(8, 64)
    backward = Backward.measured(model, lambda: model(x).sum())
    weights = {model[0].weight.nbytes, model[1].weight.nbytes, model[1].bias.nbytes}
    assert set(backward.nbytes) == weights and backward.nbytes[-1] == model[0].weight.nbytes
    assert 0 < backward.ready[0] <= backward.ready[-1] <= backward.seconds and backward.forward > 0
    assert backward.total_bytes == sum(weights)
    model(x).sum().backward()
    assert len(backward.ready) == 3  # nothing listens any more


def test_groups_of_ones_own():
    tens = Backward.in_proportion([MB] * 4, 4.0)
    wire = Wire(0, 1 / MB, 2)
    assert spans(cost.grouped(tens, wire, [[0, 1], [2, 3]])) == [(2, 4), (4, 6)]
    late_first = cost.grouped(tens, wire, [[3], [0, 1, 2]])  # the second is full at 3, and posted after the first
    assert [each.posted for each in late_first.all_reduces] == [4, 4] and late_first.exposed == 4
    for plan in ([[0, 1], [2]], [[0, 1], [1, 2, 3]], [[0, 1, 2, 3, 4]]):
        with pytest.raises(ValueError, match="each of 4 gradients once"):
            cost.grouped(tens, wire, plan)
