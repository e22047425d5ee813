"""ZeRO-2: reduced gradients are the means, on their owners alone; training goes on as with an all-reduce."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.optim import SGD, AdamW

from scratch_ddp.ddp import FlatDDP
from scratch_ddp.instruments.traffic import traffic
from scratch_ddp.zero import ShardedOptimizer, clip_grad_norm_, reduce_gradients
from tests.ddp.cases import CASES, assert_equal, batches, build, shard
from tests.ranks import in_turn, run_ranks
from tests.zero.cases import everything, give_gradients

PLAIN = [name for name in CASES if name != "BatchNorm"]  # its buffers are a wrapper's business


def compare_with_an_all_reduce(name: str) -> None:
    """Four steps with reduced and with averaged gradients."""
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
        averaged.sync_gradients()
        norms = clip_grad_norm_(sharded, 0.05), nn.utils.clip_grad_norm_(averaged.parameters(), 0.05)
        assert abs(norms[0].item() - norms[1].item()) < 1e-6 * norms[1].item()
        for optimizer in (sharded, plain):
            optimizer.step()
            optimizer.zero_grad()
    assert_equal(model, averaged, atol=1e-7 if name == "several dtypes" else 1e-12)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_training_equals_that_with_an_all_reduce(n):
    in_turn(n, compare_with_an_all_reduce, [(name,) for name in PLAIN])


def what_is_held() -> tuple[int, int]:
    """Each mean is with its owner and nowhere else. The bytes of gradients that stay here, and those sent."""
    model, other = everything().float(), FlatDDP(everything().float())
    optimizer = ShardedOptimizer(model.parameters(), SGD)
    give_gradients(dist.get_rank(), model, other.module, all_have=True)
    other.sync_gradients()
    with traffic() as counted:
        reduce_gradients(optimizer)
    assert set(counted.calls) == {"reduce"}
    for parameter, twin in zip(model.parameters(), other.parameters(), strict=True):
        assert (parameter.grad is not None) == (parameter.requires_grad and optimizer.owns(parameter))
        assert parameter.grad is None or torch.allclose(parameter.grad, twin.grad, atol=1e-6)
    return sum(each.grad.nbytes for each in model.parameters() if each.grad is not None), counted.wire_bytes


def test_each_mean_is_with_its_owner_and_nowhere_else():
    held, sent = zip(*run_ranks(3, what_is_held), strict=True)
    assert sum(sent) == 2 * sum(held)  # a reduce-scatter's bytes


def scaled(stage: int, clips: bool) -> tuple[float, ...]:
    """Four steps with a GradScaler; in the second, one gradient overflows on one rank. The parameters and the scale."""
    torch.manual_seed(0)
    model, n = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), dist.get_world_size()
    model, last = (FlatDDP(model), "module.1.bias") if stage == 1 else (model, "1.bias")
    make = ShardedOptimizer if stage else lambda params, cls, **options: cls(params, **options)
    optimizer, scaler = make(model.parameters(), SGD, lr=0.1), GradScaler("cpu", init_scale=8.0, growth_interval=2)
    for step in range(4):
        rows = [torch.full((1, 4), 1.0 + step + rank) for rank in range(n)]  # each rank's batch
        mine = [rows[dist.get_rank()]] if stage else rows
        scaler.scale(sum(model(row).sum() for row in mine) / len(mine)).backward()
        if step == 1 and dist.get_rank() == 0 or not stage:
            model.get_parameter(last).grad += float("inf") if step == 1 else 0.0
        if stage:
            reduce_gradients(optimizer) if stage == 2 else model.sync_gradients()
        if clips:
            scaler.unscale_(optimizer)
            clip_grad_norm_(optimizer, 0.5) if stage else nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return *nn.utils.parameters_to_vector(model.parameters()).tolist(), scaler.get_scale()


def scaled_as_in_one_process(stage: int, clips: bool) -> None:
    assert scaled(stage, clips) == pytest.approx(scaled(0, clips), rel=1e-5)


@pytest.mark.parametrize("n", [2, 5])  # also more ranks than parameters
def test_a_grad_scaler_skips_the_same_steps_on_every_rank(n):
    in_turn(n, scaled_as_in_one_process, [(stage, clips) for stage in (1, 2) for clips in (False, True)])
