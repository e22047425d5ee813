"""The sharded optimizer beside every data-parallel strategy, on every kind of group; and what a step sends."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

import scratch_ddp.cells.rank.interruptible_group  # noqa: F401  (registers the backend of rank cells)
from scratch_ddp.instruments.network import Link, linked_group
from scratch_ddp.instruments.traffic import ring_bytes, traffic
from scratch_ddp.zero import ShardedOptimizer
from scratch_ddp.zero.owners import LARGE, share_out
from tests.ddp.cases import STRATEGIES, batches, mlp, shard
from tests.ranks import run_ranks
from tests.zero.cases import everything, give_gradients, same, twin


def trained(strategy: type, sharded: bool) -> list[torch.Tensor]:
    """Five steps of a small model over two micro-batches each, with clipped gradients; the parameters then."""
    torch.manual_seed(0)
    model = strategy(mlp().double())
    make = ShardedOptimizer if sharded else lambda params, cls, **options: cls(params, **options)
    optimizer = make(model.parameters(), AdamW, lr=0.01)
    for x, y in batches(5, dist.get_world_size()):
        x, y = shard(x, dist.get_rank()), shard(y, dist.get_rank())
        with model.no_sync():
            mse_loss(model(x[:4]), y[:4]).backward()
        mse_loss(model(x[4:]), y[4:]).backward()
        getattr(model, "sync_gradients", lambda: None)()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("backend", ["gloo", "interruptible"])
def test_with_every_strategy(backend):
    def each_pair():
        return [
            same(trained(strategy, True), trained(strategy, False))
            for strategy in [*STRATEGIES, DistributedDataParallel]
        ]

    for held in run_ranks(3, each_pair, backend=backend):
        assert all(held)


def step_counted() -> tuple:
    model = everything()
    optimizer = ShardedOptimizer(model.parameters(), AdamW)
    counts = []
    for step in range(2):
        give_gradients(step, model, all_have=True)
        with traffic() as counted:
            optimizer.step()
        counts.append((counted.calls, counted.wire_bytes, counted.setup.calls, counted.setup.payload_bytes))
    small, large = {}, 0
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.numel() * parameter.element_size() < LARGE:
            key = (optimizer.owners.of(parameter), parameter.dtype)
            small[key] = small.get(key, 0) + parameter.numel() * parameter.element_size()
        elif parameter.requires_grad:
            large += 1
    messages = sum(size > 0 for size in small.values()) + large
    trained_bytes = [p.numel() * p.element_size() for p in model.parameters() if p.requires_grad]
    return counts, messages, sum(trained_bytes), len(list(model.parameters()))


@pytest.mark.parametrize("n", [2, 4])
def test_a_step_costs_what_its_docstring_says(n):
    reports = run_ranks(n, step_counted)
    (first, second), messages, trained_bytes, parameters = reports[0]
    assert first[0] == second[0] == {"broadcast": messages} and messages < parameters / 2
    assert sum(counts[1][1] for counts, *_ in reports) == (n - 1) * trained_bytes  # (n-1)/n of them a rank, on average
    assert first[2] == {"all_reduce": 2, "all_gather": 1} and second[2] == {"all_reduce": 1}
    assert second[3] == 4 * parameters + 65
    assert ring_bytes("broadcast", trained_bytes, n, 0, 0) == trained_bytes  # the formula behind the sum


def test_shares_are_as_even_as_promised_and_the_same_for_all():
    sizes = [13, 7, 7, 7, 1, 0, 30, 2, 2, 9]
    for n in (1, 2, 3, 4, 7):
        loads = [0] * n
        owners = share_out(sizes, loads)
        assert owners == share_out(sizes, [0] * n)
        assert [sum(size for size, owner in zip(sizes, owners, strict=True) if owner == r) for r in range(n)] == loads
        assert max(loads) - min(loads) <= max(sizes)
    assert share_out([5, 5], [10, 0]) == [1, 1]  # what comes later goes to whom has least


def the_same_bits_everywhere() -> str:
    model = everything()
    optimizer = ShardedOptimizer(model.parameters(), AdamW, lr=0.1)
    give_gradients(1, model)
    model.scalar.grad = torch.tensor(float("nan"))
    optimizer.step()
    alone = twin(model)
    for parameter in alone.parameters():
        dist.broadcast(parameter.detach(), 0)
    return same(list(model.parameters()), list(alone.parameters())) and bool(model.scalar.isnan())


def test_the_same_bits_on_every_rank_nan_too():
    assert run_ranks(4, the_same_bits_everywhere) == [True] * 4


def on_a_link() -> bool:
    """On a simulated link the optimizer does the same, and its messages are on the wire."""
    slow = linked_group(Link(1e-3, 1e-9, "slow", "made up"))
    model, alone = everything(), everything()
    pair = [ShardedOptimizer(model.parameters(), AdamW, slow), AdamW(alone.parameters())]
    before = len(slow.transfers)
    give_gradients(1, model, alone)
    for optimizer in pair:
        optimizer.step()
    sent = {transfer.call for transfer in slow.transfers[before:]}
    return same(list(model.parameters()), list(alone.parameters())) and "broadcast" in sent


def test_on_a_simulated_link():
    assert run_ranks(2, on_a_link) == [True, True]
