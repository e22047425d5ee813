"""Optimizer state saved by one number of ranks and loaded by another, whole and in shares; and what is refused."""

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.optim import SGD, Adagrad, AdamW

from scratch_ddp.fsdp import FSDP
from scratch_ddp.zero import ShardedOptimizer
from tests.ranks import run_ranks
from tests.zero.cases import everything, give_gradients, same, two_groups

CASES = {"AdamW": (AdamW, {"lr": 0.1}), "Adagrad": (Adagrad, {"lr": 0.1}), "SGD": (SGD, {"lr": 0.1, "momentum": 0.9})}


def stepped(optimizer: torch.optim.Optimizer, model: torch.nn.Module, steps: range) -> None:
    for step in steps:
        give_gradients(step, model)
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= 0.9  # options are part of what is saved


def plain_run(name: str, steps: range) -> tuple:
    cls, options = CASES[name]
    model = everything()
    optimizer = cls(two_groups(model), **options)
    stepped(optimizer, model, steps)
    return model, optimizer


def first_half(folder: Path) -> None:
    """Two steps; save the whole on rank 0 and the shares of all."""
    for name, (cls, options) in CASES.items():
        model = everything()
        optimizer = ShardedOptimizer(two_groups(model), cls, **options)
        stepped(optimizer, model, range(2))
        whole = optimizer.gather_full_state_dict()
        optimizer.save(folder / name)
        if dist.get_rank() == 0:
            torch.save({"model": model.state_dict(), "optimizer": whole}, folder / f"{name}.pt")


def second_half(folder: Path, how: str) -> list[str]:
    """Load and go on for two steps; say what differs from one process that ran all four."""
    wrong = []
    for name, (cls, options) in CASES.items():
        saved = torch.load(folder / f"{name}.pt", mmap=True)
        model = everything()
        model.load_state_dict(saved["model"])
        optimizer = ShardedOptimizer(two_groups(model), cls, **options)
        if how == "whole":
            optimizer.load_state_dict(saved["optimizer"])
        else:
            optimizer.load(folder / name)
        stepped(optimizer, model, range(2, 4))
        alone, plain = plain_run(name, range(4))
        if not same(list(model.parameters()), list(alone.parameters())):
            wrong.append(f"{name}: parameters")
        whole = optimizer.gather_full_state_dict(to=1)
        if (whole is not None) != (dist.get_rank() == 1) or (whole and not same(whole, plain.state_dict())):
            wrong.append(f"{name}: state")
    return wrong


@pytest.mark.parametrize("saved_by, loaded_by", [(2, 3), (3, 2), (1, 4)])
def test_saved_by_some_ranks_and_loaded_by_others(tmp_path, saved_by, loaded_by):
    run_ranks(saved_by, first_half, tmp_path)
    for how in ("whole", "shares"):
        if loaded_by > 1:
            assert run_ranks(loaded_by, second_half, tmp_path, how) == [[]] * loaded_by, how


def test_what_was_saved_loads_into_the_plain_optimizer_and_back(tmp_path):
    run_ranks(2, first_half, tmp_path)
    for name, (cls, options) in CASES.items():
        saved = torch.load(tmp_path / f"{name}.pt")
        model = everything()
        model.load_state_dict(saved["model"])
        plain = cls(two_groups(model), **options)
        plain.load_state_dict(saved["optimizer"])
        stepped(plain, model, range(2, 4))
        alone, other = plain_run(name, range(4))
        assert same(plain.state_dict(), other.state_dict())
        assert same(list(model.parameters()), list(alone.parameters()))


def its_own_share_comes_back() -> bool:
    model = everything()
    optimizer = ShardedOptimizer(model.parameters(), AdamW)
    stepped(optimizer, model, range(2))
    share = optimizer.state_dict()
    again = ShardedOptimizer(model.parameters(), AdamW)
    again.load_state_dict(share)
    return same(again.state_dict(), share) and again.state is again.own.state


def test_a_rank_takes_back_its_own_share():
    assert run_ranks(3, its_own_share_comes_back) == [True] * 3


REFUSED = {
    "no state dict": "ranks 0, 1: this is no optimizer's state dict",
    "fewer groups": "ranks 0, 1: the state was saved for groups of [22] parameters, this optimizer has groups of [10",
    "another rank's share": "rank 0: this is a share of rank 1, which lacks the state of parameters [",
    "another model": "saved with shape (7, 5), the parameter (5, 7): it is another model's",
    "no folder": "nowhere holds no checkpoint",
    "cut short": "short holds a checkpoint that was cut short: __0_0.distcp has",
    "only a folder": "holds no checkpoint",
    "a model's": "holds a checkpoint, but no state of a sharded optimizer",
}


def refusals(folder: Path) -> dict[str, str | None]:
    model = everything()
    optimizer = ShardedOptimizer(two_groups(model), AdamW)
    stepped(optimizer, model, range(2))
    whole = optimizer.gather_full_state_dict(0)
    shares = [None] * dist.get_world_size()
    dist.all_gather_object(shares, (optimizer.state_dict(), whole))
    whole = shares[0][1]
    bent = {**whole, "state": {n: dict(entry) for n, entry in whole["state"].items()}}
    (number,) = (n for n, entry in bent["state"].items() if entry["exp_avg"].shape == (5, 7))
    bent["state"][number]["exp_avg"] = bent["state"][number]["exp_avg"].t()
    saved_for_one = {**whole, "param_groups": [{**whole["param_groups"][0], "params": list(range(22))}]}
    FSDP(everything().layers).save(folder / "model")
    said = {}
    for kind, attempt in {
        "no state dict": lambda: optimizer.load_state_dict({"model": 1}),
        "fewer groups": lambda: optimizer.load_state_dict(saved_for_one),
        "another rank's share": lambda: optimizer.load_state_dict(shares[1][0]),
        "another model": lambda: optimizer.load_state_dict(bent),
        "no folder": lambda: optimizer.load(folder / "nowhere"),
        "cut short": lambda: optimizer.load(folder / "short"),
        "only a folder": lambda: optimizer.load(folder),
        "a model's": lambda: optimizer.load(folder / "model"),
    }.items():
        try:
            attempt()
            said[kind] = None
        except ValueError as error:
            said[kind] = str(error)
            dist.barrier()
    return said


def test_what_does_not_fit_is_refused_on_every_rank(tmp_path):
    run_ranks(2, first_half, tmp_path)
    shutil.copytree(tmp_path / "AdamW", tmp_path / "short")
    for part in (tmp_path / "short").glob("*.distcp"):
        part.write_bytes(part.read_bytes()[: part.stat().st_size // 2])
    said, also = run_ranks(2, refusals, tmp_path)
    assert said == also
    for kind, text in REFUSED.items():
        assert said[kind] and text in said[kind], (kind, said[kind])
        assert len(said[kind]) < 500, said[kind]
