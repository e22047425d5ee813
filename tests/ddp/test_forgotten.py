"""Mistakes that would be silent: a step without `sync_gradients`, a forward that failed on one rank, a rank too few."""

import copy
import io
import os
import pickle
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from scratch_ddp import FSDP, BucketedDDP, FlatDDP, OverlappedDDP, ShardedOptimizer
from scratch_ddp.zero import reduce_gradients
from tests.ddp.cases import STRATEGIES, gathered, mlp
from tests.ranks import RankFailed, run_ranks

each_strategy = pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.__name__)


def same_mlp() -> nn.Module:
    torch.manual_seed(0)
    return mlp()


def mine() -> torch.Tensor:
    return torch.ones(2, 6) * (1 + dist.get_rank())


def said_by(do, errors=(ValueError, RuntimeError, TypeError)) -> str:
    try:
        do()
    except errors as error:
        return str(error)
    return ""


def backward(model: nn.Module) -> None:
    model(mine()).square().mean().backward()


def forgotten(strategy) -> list[str]:
    said = []
    for make in (lambda p: torch.optim.SGD(p, lr=0.1), lambda p: ShardedOptimizer(p, torch.optim.SGD, lr=0.1)):
        model = strategy(same_mlp())
        optimizer = make(model.parameters())
        backward(model)
        model.sync_gradients()
        optimizer.step()
        optimizer.zero_grad()
        backward(model)
        said.append(said_by(optimizer.step))
    model = strategy(same_mlp())  # one rank forgets, the other does not
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    backward(model)
    said.append(said_by(model.sync_gradients if dist.get_rank() else optimizer.step))
    return said


@each_strategy
def test_a_step_without_sync_gradients(strategy):
    for said in run_ranks(2, forgotten, strategy):
        for who, message in zip(("ranks 0, 1: ", "ranks 0, 1: ", "rank 0: "), said, strict=True):
            assert message.startswith(who) and "sync_gradients()" in message


def intended(strategy) -> None:
    """Steps with gradients of which none waits for the other ranks."""
    model = strategy(same_mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.no_sync():
        backward(model)
        optimizer.step()  # by itself, as inside torch's DDP.no_sync()
    optimizer.zero_grad()
    other = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with model.no_sync():
        backward(model)
    other.step()  # of another model
    optimizer.zero_grad()
    optimizer.step()  # of nothing
    model.remove_hooks()
    backward(model.module)
    optimizer.step()  # of an ordinary module


@each_strategy
def test_steps_that_are_meant_to_be_taken(strategy):
    run_ranks(2, intended, strategy)


def reduced_to_their_owners() -> None:
    model = FlatDDP(same_mlp())
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    backward(model)
    reduce_gradients(optimizer)
    optimizer.step()


def test_reduce_gradients_in_place_of_sync_gradients():
    run_ranks(2, reduced_to_their_owners)


class Breaks(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        if x.isnan().any():
            raise ArithmeticError("this batch is broken")
        return self.layer(x)


def failed_forward(strategy) -> list[list[str]]:
    torch.manual_seed(0)
    model, said = strategy(Breaks()), []
    for batch in range(3):
        x = mine() * (float("nan") if (batch, dist.get_rank()) == (1, 1) else 1)
        try:
            loss = model(x).mean()
        except ArithmeticError:
            continue
        loss.backward()
        with warnings.catch_warnings(record=True) as warned:
            model.sync_gradients()
        said.append([str(each.message) for each in warned])
    if dist.get_rank() == 1:
        backward(model)  # what was left out
        model.sync_gradients()
    return said


@each_strategy
def test_a_forward_that_failed_on_one_rank(strategy):
    first, second = run_ranks(2, failed_forward, strategy)
    for said in (first[1], second[1]):
        assert len(said) == 1 and "(rank 1: ArithmeticError: this batch is broken)" in said[0]
    assert first[0] == second[0] == first[2] == []


def fewer_batches(strategy) -> None:
    model = strategy(same_mlp())
    for _ in range(2 - dist.get_rank()):
        backward(model)
        model.sync_gradients()
    if dist.get_rank() == 1:
        os._exit(0)


@pytest.mark.parametrize("strategy", [FlatDDP, BucketedDDP, FSDP], ids=lambda strategy: strategy.__name__)
def test_a_rank_that_runs_out_of_batches(strategy):
    with pytest.raises(RankFailed) as failed:
        run_ranks(2, fewer_batches, strategy)
    assert "Another rank has ended" in failed.value.failures[0] and "drop_last=True" in failed.value.failures[0]


def wrong_arguments() -> list[str]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    return [
        said_by(lambda: BucketedDDP(FSDP(same_mlp()))),
        said_by(lambda: FlatDDP(nn.Sequential(FSDP(same_mlp())))),
        said_by(lambda: BucketedDDP(same_mlp(), dist.group.WORLD)),
        said_by(lambda: BucketedDDP(same_mlp(), mesh)),
        said_by(lambda: BucketedDDP(same_mlp(), bucket_cap_mb=25)),
        said_by(lambda: OverlappedDDP(same_mlp(), process_group=dist.group.WORLD)),
        said_by(lambda: FlatDDP(same_mlp(), find_unused_parameters=True)),
        said_by(lambda: BucketedDDP(same_mlp(), device_ids=[0])),
        said_by(lambda: FSDP(same_mlp(), mesh=mesh)),
        said_by(lambda: FSDP(same_mlp(), mp_policy=None)),
        said_by(lambda: FSDP(same_mlp(), reshard_after_forward=False)),
        said_by(lambda: ShardedOptimizer(same_mlp().parameters(), optimizer_class=torch.optim.SGD)),
    ]


def test_arguments_that_are_torchs():
    expected = [
        "ranks 0, 1: the model is sharded by FSDP, so that ranks hold different parameters: to replicate shards (HSDP)",
        "ranks 0, 1: '0' is sharded by FSDP",
        "ranks 0, 1: the ProcessGroup was taken for bucket_mb: pass it by name, BucketedDDP(model, group=…)",
        "ranks 0, 1: the DeviceMesh was taken for bucket_mb",
        "BucketedDDP takes no 'bucket_cap_mb', which is torch's: BucketedDDP calls it bucket_mb",
        "OverlappedDDP takes no 'process_group', which is torch's: pass it as group",
        "FlatDDP takes no 'find_unused_parameters', which is torch's: leave it out",
        "BucketedDDP takes no 'device_ids', which is torch's: leave it out, and move the model",
        "FSDP takes no 'mesh', which is torch's: pass the mesh",
        "FSDP takes no 'mp_policy', which is torch's: pass compute_dtype",
        "FSDP takes no 'reshard_after_forward', which is torch's: FSDP calls it free_after_forward",
        "ShardedOptimizer.__init__() missing 1 required positional argument: 'optimizer_cls'",
    ]
    for messages in run_ranks(2, wrong_arguments):
        for message, start in zip(messages, expected, strict=True):
            assert message.startswith(start), message


def copies(strategy) -> list[str]:
    model = strategy(same_mlp())
    backward(model)
    model.sync_gradients()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False), copy.deepcopy(model)):
        other.zero_grad()
        backward(other)
        other.sync_gradients()
        for one, its in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(one.grad, its.grad) and one.grad is not its.grad
            assert torch.equal(*gathered(its.grad))
        backward(other)
        said = said_by(torch.optim.SGD(other.parameters(), lr=0.1).step)
        assert "sync_gradients()" in said  # it works from hooks of its own
    return [said_by(lambda do=do: do(strategy(same_mlp(), group=dist.new_group()))) for do in (pickle.dumps, copy.copy)]


@each_strategy
def test_wrappers_can_be_pickled_and_copied(strategy):
    for messages in run_ranks(2, copies, strategy):
        for message in messages:
            assert "with a group of its own can't be pickled or copied: save module.state_dict()" in message
