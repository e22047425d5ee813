"""torch's get_state_dict and set_state_dict: shares saved by two ranks and loaded by three, as by one process."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from scratch_ddp.zero import ShardedOptimizer
from tests.ranks import run_ranks
from tests.zero.cases import everything, give_gradients, same, two_groups

SHARES = StateDictOptions(strict=False)  # a rank lacks the state that others own


def make() -> tuple[nn.Module, ShardedOptimizer]:
    model = everything()
    return model, ShardedOptimizer(two_groups(model), torch.optim.AdamW, lr=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        give_gradients(step, model, all_have=True)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] *= 0.9


def as_one_process() -> nn.Module:
    model = everything()
    train(model, torch.optim.AdamW(two_groups(model), lr=0.1), range(4))
    return model


def states_of(model: nn.Module, optimizer: ShardedOptimizer) -> dict:
    return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}


def save(folder: Path) -> None:
    model, optimizer = make()
    train(model, optimizer, range(2))
    dcp.save(states_of(model, optimizer), checkpoint_id=folder)
    whole = optimizer.gather_full_state_dict()
    if dist.get_rank() == 0:
        plain = torch.optim.AdamW(two_groups(model), lr=0.1)
        plain.load_state_dict(whole)
        torch.save(get_optimizer_state_dict(model, plain), folder / "whole.pt")


def load(folder: Path) -> None:
    for whole in (False, True):
        model, optimizer = make()
        states = states_of(model, optimizer)
        dcp.load(states, checkpoint_id=folder)
        set_model_state_dict(model, states["model"])
        if whole:  # of the plain optimizer, with names
            set_optimizer_state_dict(model, optimizer, torch.load(folder / "whole.pt"))
        else:
            set_optimizer_state_dict(model, optimizer, states["optimizer"], options=SHARES)
        train(model, optimizer, range(2, 4))
        assert same(list(model.parameters()), list(as_one_process().parameters()))


@pytest.mark.parametrize("world_size", [3, 1])
def test_saved_by_two_ranks_and_loaded_by_others(tmp_path, world_size):
    run_ranks(2, save, tmp_path)
    run_ranks(world_size, load, tmp_path)


def another_ranks_share() -> str:
    model, optimizer = make()
    train(model, optimizer, range(1))
    shares = [None] * 2
    dist.all_gather_object(shares, get_optimizer_state_dict(model, optimizer))
    with pytest.raises(ValueError) as caught:
        set_optimizer_state_dict(model, optimizer, shares[0], options=SHARES)
    return str(caught.value)


def test_a_share_of_another_rank_is_refused_on_every_rank():
    for message in run_ranks(2, another_ranks_share):
        assert message.startswith("rank 1: the state of ") and "is missing, which this rank owns" in message


def nothing_owned() -> int:
    layer = nn.Linear(2, 2)
    nn.init.ones_(layer.weight)
    optimizer = ShardedOptimizer([layer.weight], torch.optim.AdamW, lr=0.1)
    get_optimizer_state_dict(layer, optimizer)  # torch makes the first step on all ranks
    return len(get_optimizer_state_dict(layer, optimizer)["state"])  # and not a second one on one rank alone


def test_a_rank_that_owns_nothing_does_not_step_alone():
    assert sorted(run_ranks(2, nothing_owned)) == [0, 1]
