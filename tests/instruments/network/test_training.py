"""Training on a link: torch's classes and ours, unchanged, with the gradients they have without it."""

import threading
import time

import pytest
import torch
import torch._dynamo  # noqa: F401  imported at first use: once here, not in every forked rank
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import scratch_ddp.cells.rank.interruptible_group  # noqa: F401  registers the backend of rank cells
from scratch_ddp.ddp import FlatDDP
from scratch_ddp.instruments.network import Link, linked_group, lone_rank
from scratch_ddp.instruments.traffic import traffic
from tests.ranks import run_ranks

QUICK = Link(1e-4, 1e-9)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 6)).double()


def torch_ddp(model, group):
    return DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.0001)


def torch_fsdp(model, group):
    mesh = DeviceMesh.from_group(group, "cpu") if group else None
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    return model


def flat(model, group):
    return FlatDDP(model, group)


STRATEGIES = [torch_ddp, torch_fsdp, flat]


def train(strategy, group, rows):
    """Three steps; the weights, and what was sent in the last one."""
    wrapped = strategy(net(), group)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for _ in range(3):
        with traffic() as counted:
            wrapped(rows).square().mean().backward()
            getattr(wrapped, "sync_gradients", lambda: None)()
        optimizer.step()
        optimizer.zero_grad()
    weights = [getattr(each, "full_tensor", lambda each=each: each)().detach() for each in wrapped.parameters()]
    return weights, counted.calls, counted.wire_bytes, counted.setup.calls


def on_ranks(strategy, link):
    group = link and linked_group(link)
    rows = torch.linspace(-1, 1, 24, dtype=torch.float64).view(4, 6) * (dist.get_rank() + 1)
    *trained, setup = train(strategy, group, rows)
    through = len(group.transfers) if group else 0
    return *trained, setup, through, alarm_is_over()


def alarm_is_over():
    """The thread that futures need goes when they have come."""
    deadline = time.monotonic() + 5
    while any(thread.name == "transfer-alarm" for thread in threading.enumerate()):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


@pytest.fixture(scope="module")
def without_a_link():
    return {strategy: run_ranks(2, on_ranks, strategy, None) for strategy in STRATEGIES}


@pytest.mark.parametrize("backend", ["gloo", "interruptible"])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.__name__)
def test_with_peers(strategy, backend, without_a_link):
    for plain, linked in zip(
        without_a_link[strategy], run_ranks(2, on_ranks, strategy, QUICK, backend=backend), strict=True
    ):
        assert all(torch.equal(one, other) for one, other in zip(plain[0], linked[0], strict=True))
        assert plain[1:4] == linked[1:4]  # counted once, as without a link
        assert linked[4] >= 3 * sum(linked[1].values()) and linked[5]


@pytest.mark.parametrize("strategy", [torch_ddp, flat], ids=lambda strategy: strategy.__name__)
@pytest.mark.parametrize("world_size", [2, 64])
def test_alone(strategy, world_size):
    """Every peer has the same rows: the mean of the gradients is this rank's own."""
    rows = torch.linspace(-1, 1, 24, dtype=torch.float64).view(4, 6)
    own = net()
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
    for _ in range(3):
        own(rows).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    group = lone_rank(world_size, QUICK)
    try:
        weights, *_ = train(strategy, group, rows)
        assert all(torch.equal(one, other) for one, other in zip(weights, own.parameters(), strict=True))
    finally:
        dist.destroy_process_group()


def test_a_lone_rank_in_fully_shard():
    lone_rank(4, QUICK)
    try:
        model = fully_shard(nn.Linear(8, 8, bias=False), mesh=dist.init_device_mesh("cpu", (4,)))
        assert model.weight.to_local().shape == (2, 8)
        model(torch.ones(1, 8)).sum().backward()
        assert torch.equal(model.weight.grad.to_local(), torch.ones(2, 8))
    finally:
        dist.destroy_process_group()


def test_a_rank_that_was_replaced():
    """Rank cells refuse groups that a new rank does not know; what is linked over them as well."""

    def retired():
        group = linked_group(QUICK)
        group.below.retire()
        with pytest.raises(RuntimeError, match="made before a rank was replaced"):
            dist.all_reduce(torch.ones(1), group=group)
        return len(group.transfers)

    assert run_ranks(2, retired, backend="interruptible") == [0, 0]
