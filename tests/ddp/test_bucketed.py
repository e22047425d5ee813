"""Buckets: which gradients share one, how many travel, and that their memory is there for good."""

import math
import random
from collections.abc import Callable

import torch
import torch._dynamo  # noqa: F401  imported at first use: once here, not in every forked rank
import torch.distributed as dist
from torch import nn

from scratch_ddp.common.tensors import MB
from scratch_ddp.ddp import BucketedDDP
from scratch_ddp.ddp.bucketed import bucket_groups, bucket_plan
from scratch_ddp.instruments.memory.use import memory_use
from tests.ddp.cases import started
from tests.ranks import in_turn


def parameters(sizes, dtype=torch.float32) -> list[nn.Parameter]:
    """Parameters of `sizes` MB on the meta device, which takes no memory."""
    elements = (int(size * MB) // dtype.itemsize for size in sizes)
    return [nn.Parameter(torch.empty(each, dtype=dtype, device="meta")) for each in elements]


def test_buckets_are_those_of_torchs_ddp():
    chance = random.Random(0)
    for _ in range(50):
        elements = [chance.randint(1, 400) for _ in range(chance.randint(1, 40))]
        limit, first = chance.randint(4, 3000), chance.randint(4, 1000)
        theirs, _ = dist._compute_bucket_assignment_by_size([torch.empty(n) for n in elements], [first, limit])
        assert bucket_plan([4 * n for n in elements], limit, first) == theirs


def test_which_gradients_share_a_bucket():
    """A bucket of one dtype is closed when it is full, the first soon; they are in the order in which they are full."""
    a, b, c, d, e, f = parameters([0.6, 0.6, 3, 20, 4, 1])
    assert bucket_groups([a, b, c, d, e, f], 25) == [[a, b], [c, d, e], [f]]
    assert bucket_groups([a, b, c, d, e, f], math.inf) == [[a, b], [c, d, e, f]]
    assert bucket_groups([a, b, c, d, e, f], 0.1) == [[a], [b], [c], [d], [e], [f]]
    g, h = parameters([0.9, 0.9], torch.float16)
    assert bucket_groups([a, g, c, h, f], 25) == [[a, c], [g, h], [f]]
    assert bucket_groups([], 25) == []


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
    model = mlp()
    wrapped, optimizer = BucketedDDP(model, 0.05), torch.optim.SGD(model.parameters(), lr=0.1)
    spans = [range(each.tensor.data_ptr(), each.tensor.data_ptr() + each.tensor.nbytes) for each in wrapped.buckets]
    homes = []
    for set_to_none in (True, False, True, None, None):
        wrapped(torch.ones(1, 64)).sum().backward()
        wrapped.sync_gradients()
        homes.append([parameter.grad.data_ptr() for parameter in model.parameters()])
        optimizer.step()
        if set_to_none is not None:
            optimizer.zero_grad(set_to_none=set_to_none)
    assert len(spans) == 2 and sum(map(len, spans)) == 6 * (64 * 64 + 64) * 4
    assert all(any(home in span for span in spans) for home in homes[0]) and homes == homes[:1] * 5


def allocated(model: nn.Module, sync: Callable[[], None] = lambda: None) -> int:
    """Bytes in a step that is not the first."""
    for _ in range(3):
        with memory_use() as used:
            model(torch.ones(1, 64)).sum().backward()
            sync()
            model.zero_grad()
    return used.allocated_bytes


def no_buffers() -> None:
    """None is allocated after the first step: no more than numbers and the small exchange of presence."""
    wrapped = BucketedDDP(mlp(), 0.05)
    assert allocated(wrapped, wrapped.sync_gradients) - allocated(mlp()) < 1000


def test_gradients_are_views_of_the_same_memory_at_every_step():
    in_turn(2, lambda check: check(), [(memory,), (no_buffers,)])
