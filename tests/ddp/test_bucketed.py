"""Buckets: which gradients share one, how many travel, and that their memory is there for good."""

import itertools
import math
import random

import torch
import torch._dynamo  # noqa: F401  imported at first use: once here, not in every forked rank
from torch import nn

from scratch_ddp.common.tensors import MB
from scratch_ddp.ddp import BucketedDDP
from scratch_ddp.ddp.bucketed import FIRST_BUCKET_MB, bucket_groups
from scratch_ddp.instruments.memory import memory_use
from tests.ddp.cases import started
from tests.ranks import in_turn, run_ranks


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


def sizes_of_messages(layers_a_bucket, layers_in_each: list[int]) -> None:
    layer = 64 * 64 + 64
    wrapped = BucketedDDP(mlp(), layers_a_bucket * layer * 4 / MB)
    with started() as sizes:
        wrapped(torch.ones(1, 64)).sum().backward()
        wrapped.sync_gradients()
    assert sizes == [layers * layer for layers in layers_in_each]


def test_as_many_calls_as_buckets():
    in_turn(2, sizes_of_messages, [(math.inf, [6]), (5, [5, 1]), (2, [2, 2, 2])])


def memory() -> None:
    """Gradients are views of the same memory at every step, and no step but the first allocates more than a plain
    model's: numbers and the small exchange of presence."""
    plain, model = mlp(), mlp()
    wrapped, optimizer = BucketedDDP(model, 0.05), torch.optim.SGD(model.parameters(), lr=0.1)
    memories = [bucket.tensor for bucket in wrapped.buckets]
    assert len(memories) == 2 and sum(each.nbytes for each in memories) == 6 * (64 * 64 + 64) * 4
    spans = [range(each.data_ptr(), each.data_ptr() + each.nbytes) for each in memories]
    homes = []
    for set_to_none in (True, False, True, None, None):
        wrapped(torch.ones(1, 64)).sum().backward()
        wrapped.sync_gradients()
        homes.append([parameter.grad.data_ptr() for parameter in model.parameters()])
        optimizer.step()
        if set_to_none is not None:
            optimizer.zero_grad(set_to_none=set_to_none)
    assert all(any(home in span for span in spans) for home in homes[0]) and homes == homes[:1] * 5
    optimizer.zero_grad()
    for accumulated in (False, True):
        allocated = []
        for each, sync in ((plain, lambda: None), (wrapped, wrapped.sync_gradients)):
            for _ in range(3):
                with memory_use() as used:
                    if accumulated:
                        with wrapped.no_sync():
                            each(torch.ones(1, 64)).sum().backward()
                    each(torch.ones(1, 64)).sum().backward()
                    sync()
                    each.zero_grad()
            allocated.append(used.allocated_bytes)
        assert allocated[1] - allocated[0] < 1000, accumulated


def test_memory_of_gradients_is_there_for_good():
    run_ranks(2, memory)
