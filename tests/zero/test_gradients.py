"""ZeRO-2: reduced gradients are the means, on their owners alone; training goes on as with an all-reduce."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, AdamW

from scratch_ddp.ddp import FlatDDP
from scratch_ddp.instruments.traffic import traffic
from scratch_ddp.zero import ShardedOptimizer, clip_grad_norm_, reduce_gradients
from tests.ddp.cases import CASES, batches, build, shard
from tests.ranks import run_ranks
from tests.zero.cases import everything, give_gradients, same
from tests.zero.test_refusals import refused_everywhere

PLAIN = [name for name in CASES if name != "BatchNorm"]  # its buffers are a wrapper's business


def difference_from_all_reduce(name: str) -> float:
    """Train with reduced and with averaged gradients; the largest difference of a parameter after four steps."""
    case = CASES[name]
    model, averaged = build(case), FlatDDP(build(case))
    sharded = ShardedOptimizer(model.parameters(), AdamW, lr=0.01)
    plain = AdamW(averaged.parameters(), lr=0.01)
    for x, y in batches(4, dist.get_world_size()):
        x, y = shard(x, dist.get_rank()), shard(y, dist.get_rank())
        for each in (model, averaged):
            for half in (slice(0, 4), slice(4, 8)):  # two micro-batches before the gradients travel
                (case.loss(each, x[half], y[half]) / 2).backward()
        reduce_gradients(sharded)
        assert all(sharded.owns(p) for p in model.parameters() if p.grad is not None)
        averaged.sync_gradients()
        norms = clip_grad_norm_(sharded, 0.05), nn.utils.clip_grad_norm_(averaged.parameters(), 0.05)
        assert abs(norms[0].item() - norms[1].item()) < 1e-6 * norms[1].item()
        for optimizer in (sharded, plain):
            optimizer.step()
            optimizer.zero_grad()
    pairs = zip(model.parameters(), averaged.parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs if a.numel())


@pytest.mark.parametrize("n", [1, 2, 3])
def test_training_equals_that_with_an_all_reduce(n):
    def all_cases():
        return {name: difference_from_all_reduce(name) for name in PLAIN}

    for differences in run_ranks(n, all_cases):
        for name, difference in differences.items():
            assert difference < (1e-7 if name == "several dtypes" else 1e-12), (name, difference)


def what_is_held() -> tuple:
    """Bytes of gradients that stay, against the share's parameters; calls and bytes of the reduction."""
    model = everything().float()
    optimizer = ShardedOptimizer(model.parameters(), SGD)
    give_gradients(dist.get_rank(), model, all_have=True)
    means = [sum(_gradient(model, rank, place) for rank in range(dist.get_world_size())) for place in _places(model)]
    with traffic() as counted:
        reduce_gradients(optimizer)
    right = all(
        p.grad is None or (optimizer.owns(p) and torch.allclose(p.grad, mean / dist.get_world_size(), atol=1e-6))
        for p, mean in zip((p for p in model.parameters() if p.requires_grad), means, strict=True)
    )
    held = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    owned = sum(p.nbytes for p in model.parameters() if p.requires_grad and optimizer.owns(p))
    return right, held == owned, set(counted.calls), counted.wire_bytes, held


def _places(model: nn.Module) -> list[int]:
    return [place for place, parameter in enumerate(model.parameters()) if parameter.requires_grad]


def _gradient(model: nn.Module, rank: int, place: int) -> torch.Tensor:
    other = everything().float()
    give_gradients(rank, other, all_have=True)
    return list(other.parameters())[place].grad


@pytest.mark.parametrize("n", [2, 3])
def test_each_mean_is_with_its_owner_and_nowhere_else(n):
    reports = run_ranks(n, what_is_held)
    assert all(right and exact and calls == {"reduce"} for right, exact, calls, *_ in reports)
    whole = sum(held for *_, held in reports)
    assert sum(sent for *_, sent, _ in reports) == (n - 1) * whole  # a reduce-scatter's bytes


def test_bits_are_those_of_an_all_reduce_between_two_ranks():
    assert run_ranks(2, bits_of_both) == [True, True]


def bits_of_both() -> bool:
    model, other = everything(), everything()
    optimizer = ShardedOptimizer(model.parameters(), SGD)
    give_gradients(dist.get_rank(), model, other)
    reduce_gradients(optimizer)
    wrapped = FlatDDP(other)
    wrapped.sync_gradients()
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return all(same(a.grad, b.grad) for a, b in pairs if optimizer.owns(a) and b.grad is not None and a.numel())


FAULTS = {
    "sparse": "rank 1: the gradient of '0.weight' is sparse; only dense gradients can be averaged",
    "twice": "rank 0: the gradient of '0.weight' is a mean already, with more added to it: step and clear it before",
}


def faulty(kind: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 3))
    optimizer = ShardedOptimizer(model.named_parameters(), SGD, lr=0.1)
    model[0].sparse = dist.get_rank() == 1 and kind == "sparse"
    for set_to_none in (False, True, None):
        model(torch.tensor([1, 2])).square().sum().backward()
        reduce_gradients(optimizer)
        if set_to_none is not None:
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
    model(torch.tensor([1, 2])).square().sum().backward()  # without a step in between
    reduce_gradients(optimizer)


def test_what_cannot_be_reduced_is_refused_on_every_rank():
    for kind, message in refused_everywhere(2, faulty, FAULTS).items():
        assert FAULTS[kind] in message, message
