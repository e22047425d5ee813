"""A step is forecast, and then takes as long: the sleeping model, the strategies on a link."""

from functools import partial

import pytest
import torch
import torch._dynamo  # noqa: F401  torch's DDP imports it at its first forward
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from scratch_ddp.benchmark.steps import step
from scratch_ddp.course.pages.sleeping import SleepingModel
from scratch_ddp.ddp import BucketedDDP, FlatDDP, OverlappedDDP, SimpleDistributedDataParallelism
from scratch_ddp.instruments import cost
from scratch_ddp.instruments.cost import Backward
from scratch_ddp.instruments.network import Link, lone_rank

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
