"""Ranks that do not do the same: the right result where there is one, else an error on every rank; never a hang."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.fsdp import FSDP
from tests.ddp.cases import CASES, batches, build, one_process_step, shard
from tests.fsdp.cases import Chain, assert_equal
from tests.ranks import run_ranks

MLP = CASES["mlp"]
X = torch.ones(2, 6, dtype=torch.float64)


class ByRank(nn.Module):
    """Each rank calls the blocks in an order of its own, or only some of them."""

    def __init__(self, orders: dict[int, list[int]]):
        super().__init__()
        self.blocks, self.orders = nn.ModuleList(nn.Linear(6, 6) for _ in range(4)), orders
        self.rank = dist.get_rank()

    def forward(self, x):
        for i in self.orders[self.rank]:
            x = torch.tanh(self.blocks[i](x))
        return x


def own_ways(orders: dict[int, list[int]]) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    sharded = FSDP(ByRank(orders).double())
    torch.manual_seed(0)
    alone = ByRank(orders).double()
    for step, (x, y) in enumerate(batches(3, world_size)):
        for alone.rank in range(world_size):
            (MLP.loss(alone, shard(x, alone.rank), shard(y, alone.rank)) / world_size).backward()
        MLP.loss(sharded, shard(x, rank), shard(y, rank)).backward()
        sharded.sync_gradients()
        for model in (alone, sharded):
            torch.optim.SGD(model.parameters(), lr=0.1).step()
        assert_equal(sharded, alone, step)
        alone.zero_grad(), sharded.zero_grad()


@pytest.mark.parametrize(
    "orders",
    [{0: [0, 1, 2, 3], 1: [3, 1]}, {0: [2, 0, 3, 1], 1: [1, 3, 0, 2]}, {0: [], 1: [0, 1, 2, 3]}, {0: [1], 1: [2]}],
    ids=str,
)
def test_units_used_on_some_ranks_or_in_another_order(orders):
    orders = orders if orders[0] else orders | {0: [0]}
    run_ranks(2, own_ways, orders)


def without_backward(when: int) -> None:
    """A rank's loss does not depend on the model in one step, or has no backward pass."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    alone, sharded = build(MLP), FSDP(build(MLP))
    for step, (x, y) in enumerate(batches(3, world_size)):
        absent = 1 if step == when else None
        for other in range(world_size):
            loss = MLP.loss(alone, shard(x, other), shard(y, other)) / world_size
            loss.backward() if other != absent else None
        loss = MLP.loss(sharded, shard(x, rank), shard(y, rank))
        loss.backward() if rank != absent else None
        sharded.sync_gradients()
        assert_equal(sharded, alone, step)
        alone.zero_grad(), sharded.zero_grad()


@pytest.mark.parametrize("when", [0, 1])
def test_a_rank_without_backward(when):
    run_ranks(3, without_backward, when)


def nobody_has_gradients() -> None:
    sharded = FSDP(build(MLP))
    sharded(X)
    sharded.sync_gradients()
    assert all(parameter.grad is None for parameter in sharded.parameters())
    alone = build(MLP)
    one_process_step(MLP, alone, *batches(1, 2)[0], 2)
    x, y = (shard(rows, dist.get_rank()) for rows in batches(1, 2)[0])
    MLP.loss(sharded, x, y).backward()
    sharded.sync_gradients()
    assert_equal(sharded, alone)


def test_no_rank_has_a_backward():
    run_ranks(2, nobody_has_gradients)


def two_ways(first, second) -> str:
    """What is said when rank 0 does one thing and rank 1 the other, and whether all goes on after that."""
    sharded = FSDP(build(MLP))
    sharded(X).sum().backward()
    sharded.sync_gradients()
    try:
        (first if dist.get_rank() == 0 else second)(sharded)
        said = "nothing"
    except (RuntimeError, ValueError) as error:
        said = str(error)
    if "frozen" not in said and "interrupted" not in said:  # the ranks still differ
        sharded(X).sum().backward()
        sharded.sync_gradients()
    return said


def forward(sharded: FSDP) -> None:
    sharded(X).sum()


def evaluate(sharded: FSDP) -> None:
    with torch.no_grad():
        sharded(X)


def synchronise(sharded: FSDP) -> None:
    sharded.sync_gradients()


def gather(sharded: FSDP) -> None:
    sharded.gather_full_params()


def save(sharded: FSDP) -> None:
    sharded.full_state_dict()


def step(sharded: FSDP) -> None:
    sharded(X).sum().backward()


def two_forwards(sharded: FSDP) -> None:
    with sharded.no_sync():
        sharded(X), sharded(X)


def step_under_no_sync(sharded: FSDP) -> None:
    with sharded.no_sync():
        sharded(X).sum().backward()


def freeze_and_step(sharded: FSDP) -> None:
    sharded.module[2].requires_grad_(False)
    step(sharded)


def update_and_step(sharded: FSDP) -> None:
    with torch.no_grad():
        next(sharded.parameters()).add_(1)
    step(sharded)


OUT_OF_STEP = [
    (forward, synchronise, "rank 0 begins a forward pass, rank 1 calls sync_gradients()"),
    (forward, evaluate, "rank 0 begins a forward pass, rank 1 begins a forward pass under no_grad"),
    (forward, gather, "rank 0 begins a forward pass, rank 1 calls another method of FSDP"),
    (gather, save, "is full_state_dict(), but gather_full_params() on rank 0"),
    (lambda model: model.module[0](X), forward, "rank 0 calls a unit outside of the model's forward, rank 1 begins"),
    (step_under_no_sync, two_forwards, "rank 0 begins a backward pass, rank 1 begins a forward pass"),
    (step_under_no_sync, step, "gradients are synchronised, but gradients are not synchronised"),
    (freeze_and_step, step, "is frozen: nothing, but frozen: 2.weight, 2.bias"),
    (update_and_step, step, "a step of the optimizer was interrupted"),
]


def test_ranks_out_of_step_are_told_so():
    for first, second, expected in OUT_OF_STEP:
        for said in run_ranks(2, two_ways, first, second, timeout=20):
            assert expected in said


def again_on_one_rank() -> str:
    torch.manual_seed(0)
    sharded = FSDP(Chain(*([0, 1, 2] if dist.get_rank() == 0 else [0, 0, 1, 2])).double())
    try:
        sharded(X).sum().backward()
    except RuntimeError as error:
        return str(error)


def test_a_unit_called_again_on_one_rank_only():
    for said in run_ranks(2, again_on_one_rank, timeout=20):
        assert "rank 0 begins a backward pass, rank 1 calls a unit again in the same forward pass" in said
