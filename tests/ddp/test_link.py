"""Hook-based strategies on a simulated link: messages are on it while backward goes on, and nothing else changes."""

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import scratch_ddp.cells.rank.interruptible_group  # noqa: F401  registers the backend of rank cells
from scratch_ddp.instruments.network import Link, linked_group, lone_rank
from tests.ddp.cases import HOOKED, mlp
from tests.ranks import run_ranks

hooked = pytest.mark.parametrize("strategy", HOOKED.values(), ids=HOOKED)


def three_steps(wrapped) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for step in range(3):
        wrapped(torch.full((2, 6), step + 1.0)).square().sum().backward()
        wrapped.sync_gradients()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in wrapped.parameters()]


def with_and_without_a_link(strategy) -> bool:
    torch.manual_seed(0)
    plain = three_steps(strategy(mlp()))
    torch.manual_seed(0)
    group = linked_group(Link(1e-4, 1e-9))
    linked = three_steps(strategy(mlp(), group=group))
    return len(group.transfers) > 9 and all(torch.equal(a, b) for a, b in zip(plain, linked, strict=True))


@pytest.mark.parametrize("backend", ["gloo", "interruptible"])
@hooked
def test_the_same_weights(strategy, backend):
    assert run_ranks(2, with_and_without_a_link, strategy, backend=backend) == [True, True]


@hooked
def test_one_rank_of_64(strategy):
    """Its peers have the same gradients, so it trains as if it were alone."""
    torch.manual_seed(0)
    alone = mlp()
    alone.sync_gradients = lambda: None
    expected = three_steps(alone)
    lone_rank(64, Link(1e-4, 1e-9))
    try:
        torch.manual_seed(0)
        found = three_steps(strategy(mlp()))
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    finally:
        dist.destroy_process_group()


class SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(0.02)
        return gradient


class Slow(nn.Module):
    """Three layers, each with 20 ms of backward."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = SlowBackward.apply(layer(x))
        return x


@pytest.mark.measures_time
@hooked
def test_a_transfer_runs_while_backward_computes(strategy):
    group = lone_rank(4, Link(0.015, 0))
    try:
        wrapped = strategy(Slow())
        group.transfers.clear()
        began = time.monotonic()
        wrapped(torch.ones(1, 16, requires_grad=True)).sum().backward()
        in_backward = time.monotonic() - began
        posted = [each.posted - began for each in group.transfers]
        wrapped.sync_gradients()
        gradients = group.transfers[:3]
        assert len(posted) == 3 and posted[0] < in_backward - 0.035 and posted[1] < in_backward - 0.015
        assert all(each.ended <= after.started + 1e-6 for each, after in zip(gradients, gradients[1:], strict=False))
        assert gradients[1].ended - began < in_backward + 0.015, "two of three are over when backward is, or soon after"
    finally:
        dist.destroy_process_group()
