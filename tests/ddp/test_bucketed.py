"""Buckets: which gradients share one, how many travel, and that their memory is there for good."""

import itertools
import math
import random

import pytest
import torch
import torch._dynamo  # noqa: F401  imported at first use: once here, not in every forked rank
from torch import nn

from scratch_ddp.common.tensors import MB
from scratch_ddp.ddp import BucketedDDP
from scratch_ddp.ddp.bucketed import FIRST_BUCKET_MB, bucket_groups
from scratch_ddp.instruments.memory.use import memory_use
from tests.ddp.cases import started
from tests.ranks import run_ranks


def parameters(sizes, dtypes=(torch.float32,)) -> list[nn.Parameter]:
    """Parameters of `sizes` MB on the meta device, which takes no memory, the dtypes in turn."""
    kinds = itertools.cycle(dtypes)
    return [
        nn.Parameter(torch.empty(int(size * MB) // dtype.itemsize, dtype=dtype, device="meta"))
        for size, dtype in zip(sizes, kinds, strict=False)
    ]


def test_groups_hold_what_they_should():
    """The first bucket is small, each is closed when it is full, and they are in the order in which they are full."""
    draw = random.Random(0)
    for _ in range(200):
        bucket_mb = draw.choice([0.1, 0.7, 1, 3, 25, 1000, math.inf])
        dtypes = [torch.float32, torch.float16, torch.float64][: draw.randint(1, 3)]
        given = parameters([draw.uniform(0.01, 4) for _ in range(draw.randint(0, 40))], dtypes)
        place = {parameter: number for number, parameter in enumerate(given)}
        groups = bucket_groups(given, bucket_mb)
        places = [[place[each] for each in group] for group in groups]
        assert sorted(sum(places, [])) == list(range(len(given)))
        assert all(one == sorted(one) for one in places), "in the order given"
        assert places == sorted(places, key=lambda one: one[-1]), "in the order in which they are full"
        for kind in dtypes:
            alike = [group for group in groups if group[0].dtype == kind]
            assert all(each.dtype == kind for group in alike for each in group)
            for number, group in enumerate(alike):
                limit = bucket_mb if number else min(bucket_mb, FIRST_BUCKET_MB)
                size = sum(each.nbytes for each in group)
                assert size - group[-1].nbytes < limit * MB, "closed no later than when it is full"
                assert size >= limit * MB or number + 1 == len(alike), "and no earlier, but for what is left over"


def mlp(layers: int = 6, width: int = 64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


def calls_of_a_step(bucket_mb) -> tuple:
    wrapped = BucketedDDP(mlp(), bucket_mb)
    with started() as sizes:
        wrapped(torch.ones(1, 64)).sum().backward()
        wrapped.sync_gradients()
    return sizes


@pytest.mark.parametrize("layers_a_bucket, calls", [(math.inf, [6]), (5, [5, 1]), (2, [2, 2, 2])])
def test_as_many_calls_as_buckets(layers_a_bucket, calls):
    layer = 64 * 64 + 64
    found = run_ranks(2, calls_of_a_step, layers_a_bucket * layer * 4 / MB)
    assert found == [[layers * layer for layers in calls]] * 2


def where_gradients_are() -> list:
    model = mlp()
    wrapped, optimizer = BucketedDDP(model, 0.05), torch.optim.SGD(model.parameters(), lr=0.1)
    buckets = [bucket.tensor for bucket in wrapped.buckets]
    homes = []
    for set_to_none in (True, False, True, None, None):
        wrapped(torch.ones(1, 64)).sum().backward()
        wrapped.sync_gradients()
        homes.append([parameter.grad.data_ptr() for parameter in model.parameters()])
        optimizer.step()
        if set_to_none is not None:
            optimizer.zero_grad(set_to_none=set_to_none)
    spans = [range(each.data_ptr(), each.data_ptr() + each.nbytes) for each in buckets]
    inside = all(any(home in span for span in spans) for home in homes[0])
    return len(buckets), inside, all(home == homes[0] for home in homes)


def test_gradients_are_views_of_the_same_memory_at_every_step():
    assert run_ranks(2, where_gradients_are) == [(2, True, True)] * 2


def allocated(how: str) -> tuple[list, int]:
    """Bytes that a step allocates without a wrapper and, later than the first, with it; the buckets' bytes."""
    plain, wrapped = mlp(), BucketedDDP(mlp(), 0.05)

    def a_step(model, synchronise) -> None:
        x = torch.ones(1, 64)
        if how == "accumulated":
            with wrapped.no_sync():
                model(x).sum().backward()
        model(x).sum().backward()
        if synchronise:
            wrapped.sync_gradients()
        model.zero_grad()

    found = []
    for model in (plain, wrapped):
        for _ in range(3):
            with memory_use() as used:
                a_step(model, synchronise=model is wrapped)
        found.append(used.allocated_bytes)
    return found, sum(bucket.tensor.nbytes for bucket in wrapped.buckets)


@pytest.mark.parametrize("how", ["usual", "accumulated"])
def test_no_buffer_is_allocated_after_the_first_step(how):
    for (plain, wrapped), buckets in run_ranks(2, allocated, how):
        assert buckets == 6 * (64 * 64 + 64) * 4
        assert wrapped - plain < 1000, "no more than numbers and the small exchange of presence"
