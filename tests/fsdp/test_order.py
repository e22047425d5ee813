"""Ranks that do not do the same: the right result where there is one, else an error on every rank; never a hang."""

import functools

import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.fsdp import FSDP
from tests.ddp.cases import CASES, batches, build, shard
from tests.fsdp.cases import Case, Chain, assert_equal, message_of
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


def compare(orders: dict[int, list[int]], absent: dict[int, int]) -> None:
    """`absent`: in which step which rank has no backward pass."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    alone, sharded = (build(Case(lambda: ByRank(orders))) for _ in range(2))
    sharded = FSDP(sharded)
    for step, (x, y) in enumerate(batches(3, world_size)):
        for alone.rank in range(world_size):
            loss = MLP.loss(alone, shard(x, alone.rank), shard(y, alone.rank)) / world_size
            loss.backward() if absent.get(step) != alone.rank else None
        loss = MLP.loss(sharded, shard(x, rank), shard(y, rank))
        loss.backward() if absent.get(step) != rank else None
        sharded.sync_gradients()
        for model in (alone, sharded):
            torch.optim.SGD(model.parameters(), lr=0.1).step()
        assert_equal(sharded, alone, (orders, absent, step))
        alone.zero_grad(), sharded.zero_grad()


IN_ORDER = [0, 1, 2, 3]
ORDERS = [{0: IN_ORDER, 1: [3, 1]}, {0: [2, 0, 3, 1], 1: [1, 3, 0, 2]}, {0: [0], 1: IN_ORDER}, {0: [1], 1: [2]}]


def test_units_used_on_some_ranks_or_in_another_order():
    run_ranks(2, lambda: [compare(orders, {}) for orders in ORDERS])


def test_a_rank_without_backward():
    run_ranks(3, lambda: [compare(dict.fromkeys(range(3), IN_ORDER), {when: 1}) for when in (0, 1)])


def step(model: FSDP) -> None:
    model(X).sum().backward()


def forward(model: FSDP) -> None:
    model(X)


def evaluate(model: FSDP) -> None:
    with torch.no_grad():
        model(X)


def under_no_sync(model: FSDP, *todo) -> None:
    with model.no_sync():
        for do in todo:
            do(model)


def optimizer_step(model: FSDP) -> None:
    torch.optim.SGD(model.parameters(), lr=0.1).step()


IN_FORWARD, IN_BACKWARD = "begins a forward pass", "begins a backward pass, or calls sync_gradients()"
OUT_OF_STEP = [  # what the ranks do, and what is said
    (forward, FSDP.sync_gradients, f"rank 1: entry 0 is {IN_BACKWARD}, but {IN_FORWARD} on rank 0"),
    (forward, evaluate, f"rank 1: entry 0 is {IN_FORWARD} under no_grad, but {IN_FORWARD} on rank 0"),
    (forward, FSDP.gather_full_params, f"is calls gather_full_params(), but {IN_FORWARD} on rank 0"),
    (lambda model: model.module[0](X), forward, "rank 0: a unit is called by itself"),
    (lambda m: under_no_sync(m, step), lambda m: under_no_sync(m, forward, forward), f"but {IN_BACKWARD}"),
    (lambda m: under_no_sync(m, step), step, "gradients are synchronised, but gradients are not synchronised"),
    (lambda m: (m.module[2].requires_grad_(False), step(m)), step, "is frozen: nothing, but frozen: 2.weight, 2.bias"),
    (
        lambda m: (optimizer_step(m), step(m)),
        step,
        "steps of the optimizer: 1 (where ranks differ, one was interrupted",
    ),
]


def two_ways() -> list[str]:
    """What is said when rank 0 does one thing and rank 1 the other, and whether all goes on after that."""
    said = []
    for *ways, _ in OUT_OF_STEP:
        sharded = FSDP(build(MLP))
        step(sharded), sharded.sync_gradients()
        said.append(message_of(functools.partial(ways[dist.get_rank()], sharded)))
        if "frozen" not in said[-1] and "interrupted" not in said[-1]:  # the ranks still differ
            step(sharded), sharded.sync_gradients()
    return said


def test_ranks_out_of_step_are_told_so():
    for messages in run_ranks(2, two_ways):
        for said, (*_, expected) in zip(messages, OUT_OF_STEP, strict=True):
            assert expected in said


def again_on_one_rank() -> str:
    torch.manual_seed(0)
    sharded = FSDP(Chain(*([0, 1, 2] if dist.get_rank() == 0 else [0, 0, 1, 2])).double())
    return message_of(lambda: sharded(X).sum().backward())


def test_a_unit_called_again_on_one_rank_only():
    for said in run_ranks(2, again_on_one_rank, timeout=20):
        assert "is calls 'blocks.0' again in the same forward pass, but begins a backward pass" in said
