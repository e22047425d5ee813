"""Optimizer state saved by one number of ranks and loaded by another: whole, and by torch's functions."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import AdamW

from scratch_ddp.zero import ShardedOptimizer
from tests.ranks import in_turn, message_of, run_ranks
from tests.zero.cases import everything, full_state_dict, give_gradients, same, two_groups

SHARES = StateDictOptions(strict=False)  # a rank lacks the state that others own


def stepped(optimizer: torch.optim.Optimizer, model: nn.Module, steps: range) -> None:
    for step in steps:
        give_gradients(step, model)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] *= 0.9  # options are part of what is saved


def first_half(folder: Path) -> None:
    """Two steps; save the whole on rank 0, and by torch's functions."""
    model = everything()
    optimizer = ShardedOptimizer(two_groups(model), AdamW, lr=0.1)
    stepped(optimizer, model, range(2))
    whole = full_state_dict(optimizer)
    dcp.save(get_optimizer_state_dict(model, optimizer), checkpoint_id=folder / "by torch")
    if dist.get_rank() == 0:
        plain = AdamW(two_groups(model), lr=0.1)
        plain.load_state_dict(whole)
        names = get_optimizer_state_dict(model, plain)
        torch.save({"model": model.state_dict(), "optimizer": whole, "names": names}, folder / "whole.pt")


def second_half(folder: Path, how: str) -> None:
    """Load and go on for two steps; it must be as one process that ran all four."""
    saved = torch.load(folder / "whole.pt", mmap=True)
    model, alone = everything(), everything()
    model.load_state_dict(saved["model"])
    groups = two_groups(model)
    optimizer = AdamW(groups, lr=0.1) if how == "plain" else ShardedOptimizer(groups, AdamW, lr=0.1)
    if how in ("whole", "plain"):
        optimizer.load_state_dict(saved["optimizer"])
    elif how == "by torch":
        states = get_optimizer_state_dict(model, optimizer)
        dcp.load(states, checkpoint_id=folder / "by torch")
        set_optimizer_state_dict(model, optimizer, states, options=SHARES)
    elif how == "with names":
        set_optimizer_state_dict(model, optimizer, saved["names"])
    stepped(optimizer, model, range(2, 4))
    plain = AdamW(two_groups(alone), lr=0.1)
    stepped(plain, alone, range(4))
    assert same(list(model.parameters()), list(alone.parameters())), how
    if how == "whole":
        assert same(full_state_dict(optimizer), plain.state_dict())


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A folder with what two ranks have saved."""
    folder = tmp_path_factory.mktemp("saved")
    run_ranks(2, first_half, folder)
    return folder


@pytest.mark.parametrize("ranks", [1, 3])
def test_saved_by_two_ranks_and_loaded_by_others(saved, ranks):
    ways = ("whole", "plain", "by torch", "with names")
    in_turn(ranks, second_half, [(saved, how) for how in ways])


def refusals() -> None:
    model, n = everything(), dist.get_world_size()
    optimizer = ShardedOptimizer(two_groups(model), AdamW)
    stepped(optimizer, model, range(2))
    shares = [None] * n
    dist.all_gather_object(shares, (optimizer.state_dict(), get_optimizer_state_dict(model, optimizer)))
    optimizer.load_state_dict(shares[dist.get_rank()][0])  # its own comes back
    assert same(optimizer.state_dict(), shares[dist.get_rank()][0]) and optimizer.state is optimizer.own.state
    for says, attempt in (
        ("ranks 0, 1: KeyError: 'param_groups'", lambda: optimizer.load_state_dict({"model": 1})),
        ("rank 0: the state of parameter ", lambda: optimizer.load_state_dict(shares[1][0])),
        (
            "rank 1: the state of parameter '",
            lambda: set_optimizer_state_dict(model, optimizer, shares[0][1], options=SHARES),
        ),
    ):
        said = message_of(attempt)
        dist.barrier()
        assert says in said, said


def test_what_does_not_fit_is_refused_on_every_rank():
    run_ranks(2, refusals)


def nothing_owned() -> int:
    layer = nn.Linear(2, 2)
    nn.init.ones_(layer.weight)
    optimizer = ShardedOptimizer([layer.weight], AdamW, lr=0.1)
    get_optimizer_state_dict(layer, optimizer)  # torch makes the first step on all ranks
    return len(get_optimizer_state_dict(layer, optimizer)["state"])  # and not a second one on one rank alone


def test_a_rank_that_owns_nothing_does_not_step_alone():
    assert sorted(run_ranks(2, nothing_owned)) == [0, 1]
