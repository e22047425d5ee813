"""A step is forecast, and then takes as long: the sleeping model, the published table, the strategies on a link."""

import time
from functools import partial

import pytest
import torch
import torch._dynamo  # noqa: F401  torch's DDP imports it at its first forward
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from scratch_ddp.benchmark.steps import step
from scratch_ddp.common.tensors import MB
from scratch_ddp.course.pages import published_step
from scratch_ddp.course.pages.sleeping import SleepingModel, scaled
from scratch_ddp.ddp import BucketedDDP, FlatDDP, OverlappedDDP, SimpleDistributedDataParallelism
from scratch_ddp.ddp.bucketed import bucket_plan
from scratch_ddp.instruments import cost
from scratch_ddp.instruments.cost import Backward
from scratch_ddp.instruments.network import Link, lone_rank

BUCKETS_MB = {name: int(name.split()[0]) for name in published_step.CALLS}
TIMELINE = Backward((0.01, 0.03, 0.03, 0.06), (400, 40_000, 4, 80_000), 0.08, 0.04)


def test_the_sleeping_model_keeps_to_its_timeline():
    model = SleepingModel(TIMELINE)
    model().backward()  # the first backward of a process takes longer
    model.zero_grad()
    measured = Backward.measured(model, model)
    assert measured.nbytes == TIMELINE.nbytes
    assert measured.seconds >= TIMELINE.seconds - 0.021 and measured.forward >= TIMELINE.forward - 0.021
    assert all(at >= planned - 0.021 for at, planned in zip(measured.ready, TIMELINE.ready, strict=True))
    assert [weight.nbytes for weight in model.weights] == [80_000, 4, 40_000, 400]
    assert all(torch.equal(weight.grad, torch.ones_like(weight)) for weight in model.parameters())


def test_hooks_run_beside_the_compute():
    model = SleepingModel(TIMELINE)
    for weight in model.weights:
        weight.register_post_accumulate_grad_hook(lambda _: time.sleep(0.01))
    assert min(Backward.measured(model, model).seconds for _ in range(3)) < TIMELINE.seconds + 0.03


def test_a_sleeping_model_without_gradients():
    model = SleepingModel(Backward((), (), 0.01, 0.01))
    model().backward()
    assert not list(model.parameters())


def test_scaled():
    small = scaled(TIMELINE, 1 / 1000)
    assert small.nbytes == (4, 40, 4, 80) and small.ready == TIMELINE.ready


def test_the_published_model_has_the_published_calls():
    nbytes = published_step.gradient_bytes()
    assert len(nbytes) == 219 and 1.4e9 < sum(nbytes) < 2e9
    for name, size in BUCKETS_MB.items():
        assert len(bucket_plan(nbytes, size * MB, size * MB)) == published_step.CALLS[name]


def test_the_published_steps_are_forecast():
    timeline = published_step.timeline()
    wire = published_step.link(timeline.total_bytes).wire(2)
    assert 1e3 * cost.naive(timeline, wire).step == pytest.approx(1406.7)  # this and the next were fitted
    assert 1e3 * cost.flat(timeline, wire).step == pytest.approx(1365.2)
    for name, size in BUCKETS_MB.items():
        close = 0.09 if name == "100 MB" else 0.03
        assert 1e3 * cost.bucketed(timeline, wire, size).step == pytest.approx(
            published_step.PUBLISHED[name], rel=close
        )


@pytest.fixture
def slow():
    """A link on which the gradients of TIMELINE take 60 ms."""
    yield lone_rank(2, Link(0.001, 0.06 / TIMELINE.total_bytes))
    dist.destroy_process_group()


STRATEGIES = {
    "naive": (SimpleDistributedDataParallelism, cost.naive),
    "flat": (FlatDDP, cost.flat),
    "per parameter": (OverlappedDDP, cost.per_parameter),
    "buckets": (lambda model: BucketedDDP(model, 0.03), lambda *given: cost.bucketed(*given, 0.03)),
    "torch": (
        lambda model: DistributedDataParallel(model, bucket_cap_mb=0.03),
        lambda *given: cost.bucketed(*given, 0.03),
    ),
}


@pytest.mark.measures_time
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_step_is_as_forecast(name, slow):
    wrap, forecast = STRATEGIES[name]
    planned = forecast(TIMELINE, slow.link.wire(2))
    run = partial(step, wrap(SleepingModel(TIMELINE)))
    run()  # torch's DDP finds out in which order gradients arrive
    off = []
    for _ in range(3):
        slow.transfers.clear()
        run()
        sizes = [message.nbytes for message in planned.all_reduces]
        gradients = [each for each in slow.transfers if each.nbytes in sizes]
        assert sorted(each.nbytes for each in gradients) == sorted(sizes)
        assert sum(each.ended - each.started for each in gradients) == pytest.approx(planned.communication)
        began = gradients[0].posted - planned.all_reduces[0].posted - TIMELINE.forward
        off.append((gradients[-1].ended - began) / planned.step - 1)
    assert min(map(abs, off)) < 0.1, off
