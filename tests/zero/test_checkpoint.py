"""Optimizer state saved by one number of ranks and loaded by another: whole, in shares, and by torch's functions."""

import shutil
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
from torch.optim import Adagrad, AdamW

from scratch_ddp.fsdp import FSDP
from scratch_ddp.zero import ShardedOptimizer
from tests.ranks import run_ranks
from tests.zero.cases import everything, give_gradients, same, two_groups

CASES = {"AdamW": (AdamW, {"lr": 0.1}), "Adagrad": (Adagrad, {"lr": 0.1})}
SHARES = StateDictOptions(strict=False)  # a rank lacks the state that others own


def stepped(optimizer: torch.optim.Optimizer, model: nn.Module, steps: range) -> None:
    for step in steps:
        give_gradients(step, model)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] *= 0.9  # options are part of what is saved


def first_half(folder: Path) -> None:
    """Two steps; save the whole on rank 0 and the shares of all."""
    for name, (cls, options) in CASES.items():
        model = everything()
        optimizer = ShardedOptimizer(two_groups(model), cls, **options)
        stepped(optimizer, model, range(2))
        whole = optimizer.gather_full_state_dict()
        optimizer.save(folder / name)
        dcp.save(get_optimizer_state_dict(model, optimizer), checkpoint_id=folder / f"{name} by torch")
        if dist.get_rank() == 0:
            torch.save({"model": model.state_dict(), "optimizer": whole}, folder / f"{name}.pt")
            plain = cls(two_groups(model), **options)
            plain.load_state_dict(whole)
            torch.save(get_optimizer_state_dict(model, plain), folder / f"{name} with names.pt")


def second_half(folder: Path, how: str, name: str) -> None:
    """Load and go on for two steps; it must be as one process that ran all four."""
    cls, options = CASES[name]
    saved = torch.load(folder / f"{name}.pt", mmap=True)
    model, alone = everything(), everything()
    model.load_state_dict(saved["model"])
    make = cls if how == "plain" else lambda params, **options: ShardedOptimizer(params, cls, **options)
    optimizer = make(two_groups(model), **options)
    if how in ("whole", "plain"):
        optimizer.load_state_dict(saved["optimizer"])
    elif how == "shares":
        optimizer.load(folder / name)
    elif how == "by torch":
        states = get_optimizer_state_dict(model, optimizer)
        dcp.load(states, checkpoint_id=folder / f"{name} by torch")
        set_optimizer_state_dict(model, optimizer, states, options=SHARES)
    elif how == "with names":
        set_optimizer_state_dict(model, optimizer, torch.load(folder / f"{name} with names.pt"))
    stepped(optimizer, model, range(2, 4))
    plain = cls(two_groups(alone), **options)
    stepped(plain, alone, range(4))
    assert same(list(model.parameters()), list(alone.parameters())), (how, name)
    if how in ("whole", "shares"):
        whole = optimizer.gather_full_state_dict(to=1)
        assert (whole is not None) == (dist.get_rank() == 1), (how, name)
        assert whole is None or same(whole, plain.state_dict()), (how, name)


@pytest.mark.parametrize("saved_by, loaded_by", [(2, 3), (3, 2)])
def test_saved_by_some_ranks_and_loaded_by_others(tmp_path, saved_by, loaded_by):
    run_ranks(saved_by, first_half, tmp_path)

    def each_way():
        for name in CASES:
            for how in ("whole", "shares", "plain"):
                second_half(tmp_path, how, name)
        for how in ("by torch", "with names"):
            second_half(tmp_path, how, "AdamW")

    run_ranks(loaded_by, each_way)


REFUSED = {
    "no state dict": "ranks 0, 1: KeyError: 'param_groups'",
    "another rank's share": "rank 0: the state of parameter 0 is missing, which this rank owns",
    "another rank's share, by torch": "rank 1: the state of parameter 'nothing' is missing, which this rank owns",
    "another model": "was saved with shape (7, 5), the parameter has (5, 7): it is another model's",
    "no folder": "nowhere holds no checkpoint",
    "cut short": "short holds a checkpoint that was cut short: __0_0.distcp has",
    "a model's": "holds a checkpoint, but no state of a sharded optimizer",
}


def refusals(folder: Path) -> dict[str, str]:
    model = everything()
    optimizer = ShardedOptimizer(two_groups(model), AdamW)
    stepped(optimizer, model, range(2))
    whole = torch.load(folder / "AdamW.pt")["optimizer"]
    shares = [None] * dist.get_world_size()
    dist.all_gather_object(shares, (optimizer.state_dict(), get_optimizer_state_dict(model, optimizer)))
    optimizer.load_state_dict(shares[dist.get_rank()][0])  # its own comes back
    assert same(optimizer.state_dict(), shares[dist.get_rank()][0]) and optimizer.state is optimizer.own.state
    FSDP(everything().layers).save(folder / "model")
    attempts = {
        "no state dict": lambda: optimizer.load_state_dict({"model": 1}),
        "another rank's share": lambda: optimizer.load_state_dict(shares[1][0]),
        "another rank's share, by torch": lambda: set_optimizer_state_dict(
            model, optimizer, shares[0][1], options=SHARES
        ),
        "no folder": lambda: optimizer.load(folder / "nowhere"),
        "cut short": lambda: optimizer.load(folder / "short"),
        "a model's": lambda: optimizer.load(folder / "model"),
    }
    said = {}
    for entry in whole["state"].values():
        if entry["exp_avg"].shape == (5, 7):
            entry["exp_avg"] = entry["exp_avg"].t()
    attempts["another model"] = lambda: optimizer.load_state_dict(whole)
    for kind, attempt in attempts.items():
        with pytest.raises(ValueError) as caught:
            attempt()
        dist.barrier()
        said[kind] = str(caught.value)
    return said


def test_what_does_not_fit_is_refused_on_every_rank(tmp_path):
    run_ranks(2, first_half, tmp_path)
    shutil.copytree(tmp_path / "AdamW", tmp_path / "short")
    for part in (tmp_path / "short").glob("*.distcp"):
        part.write_bytes(part.read_bytes()[: part.stat().st_size // 2])
    said, also = run_ranks(2, refusals, tmp_path)
    assert said == also
    for kind, text in REFUSED.items():
        assert text in said[kind], (kind, said[kind])


def nothing_owned() -> int:
    layer = nn.Linear(2, 2)
    nn.init.ones_(layer.weight)
    optimizer = ShardedOptimizer([layer.weight], AdamW, lr=0.1)
    get_optimizer_state_dict(layer, optimizer)  # torch makes the first step on all ranks
    return len(get_optimizer_state_dict(layer, optimizer)["state"])  # and not a second one on one rank alone


def test_a_rank_that_owns_nothing_does_not_step_alone():
    assert sorted(run_ranks(2, nothing_owned)) == [0, 1]
