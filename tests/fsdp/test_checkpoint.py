"""Saved on some ranks and loaded on others, in each way there is; and a checkpoint that is never lost."""

import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh

from scratch_ddp.fsdp import FSDP
from tests.ddp.cases import CASES, Case, assert_equal, batches, build
from tests.fsdp.cases import Tiny
from tests.ranks import RankFailed, message_of, run_ranks


class Counter(nn.Module):
    """A buffer, and a state of the module's own."""

    def __init__(self):
        super().__init__()
        self.seen = 0
        self.register_buffer("steps", torch.zeros(1))

    def get_extra_state(self):
        return {"seen": self.seen}

    def set_extra_state(self, state):
        self.seen = state["seen"]


class Counted(Tiny):
    """Parameters with fewer rows than ranks, and a counter."""

    def __init__(self):
        super().__init__()
        self.counter = Counter()

    def forward(self, x):
        self.counter.seen += 1
        self.counter.steps += 1
        return super().forward(x)


CASE = Case(Counted)
FULL = StateDictOptions(full_state_dict=True)
BROADCAST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def train(model: nn.Module, optimizer, steps: range) -> None:
    """Every rank has the whole batch, so that any number of them computes the same."""
    data = batches(8, 1)
    for step in steps:
        CASE.loss(model, *data[step]).backward()
        if isinstance(model, FSDP):
            model.sync_gradients()
        optimizer.step()
        optimizer.zero_grad()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def make(seed: int = 0, shape=None) -> tuple[FSDP, torch.optim.Optimizer]:
    sharded = FSDP(build(CASE, seed), shape and init_device_mesh("cpu", shape))
    return sharded, adam(sharded)


def one_process(steps: int) -> nn.Module:
    plain = build(CASE)
    train(plain, adam(plain), range(steps))
    return plain


def expect(sharded: FSDP, steps: int) -> None:
    plain = one_process(steps)
    assert_equal(sharded, plain)
    assert sharded.counter.seen == plain.counter.seen


def save(folder: Path, shape=None) -> None:
    """Save three steps in each way."""
    sharded, optimizer = make(shape=shape)
    train(sharded, optimizer, range(3))
    optimizer.param_groups[0]["lr"] = 0.02
    sharded.save(folder / "ours", optimizer, {"step": 3, "seen": [1, 2]})
    optimizer.param_groups[0]["lr"] = 0.01
    model_state, optimizer_state = get_state_dict(sharded, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder / "torch's")
    whole, its_state = get_state_dict(sharded, optimizer, options=FULL)
    plain = one_process(3)
    if dist.get_rank() == 0:
        assert list(whole) == list(plain.state_dict())
        torch.save({"model_state_dict": whole, "optim_state_dict": its_state}, folder / "whole.pt")
        plain.load_state_dict(whole)
    train(sharded, optimizer, range(3, 5))
    expect(sharded, 5)


def load_ours(folder: Path, sharded: FSDP, optimizer) -> None:
    assert sharded.load(folder / "ours", optimizer) == {"step": 3, "seen": [1, 2]}
    assert optimizer.param_groups[0].pop("lr") == 0.02
    optimizer.param_groups[0]["lr"] = 0.01


def load_torchs(folder: Path, sharded: FSDP, optimizer) -> None:
    model_state, optimizer_state = get_state_dict(sharded, optimizer)
    states = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(states, checkpoint_id=folder / "torch's")
    set_state_dict(sharded, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])


def load_outside(folder: Path, sharded: FSDP, optimizer) -> None:
    """As a part of another module, whose names are those of the parts' models."""
    outer = nn.ModuleDict({"part": sharded})
    state = {"model": sharded.state_dict()}
    dcp.load(state, checkpoint_id=folder / "torch's")
    state = {f"part.{name}": value for name, value in state["model"].items()}
    assert list(outer.state_dict()) == list(get_model_state_dict(outer)) == list(state)
    assert [name for name, _ in outer.named_parameters()] == [f"part.{name}" for name, _ in sharded.named_parameters()]
    assert not any(outer.load_state_dict(state))


def load_whole(folder: Path, sharded: FSDP, optimizer) -> None:
    set_state_dict(sharded, optimizer, **torch.load(folder / "whole.pt"), options=FULL)


def load_from_first(folder: Path, sharded: FSDP, optimizer) -> None:
    state = torch.load(folder / "whole.pt")["model_state_dict"] if dist.get_rank() == 0 else {}
    set_model_state_dict(sharded, state, options=BROADCAST)


WITH_OPTIMIZER = [load_ours, load_torchs, load_whole]


def load(folder: Path) -> None:
    for way in (*WITH_OPTIMIZER, load_outside, load_from_first):
        sharded, optimizer = make(1)
        way(folder, sharded, optimizer)
        expect(sharded, 3)
        if way in WITH_OPTIMIZER:
            train(sharded, optimizer, range(3, 5))
            expect(sharded, 5)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A folder with what two ranks have saved."""
    folder = tmp_path_factory.mktemp("saved")
    run_ranks(2, save, folder)
    assert sorted(os.listdir(folder / "ours"))[:2] == [".metadata", "__0_0.distcp"]
    return folder


@pytest.mark.parametrize("ranks", [1, 3])
def test_saved_by_two_ranks_and_loaded_by_others(saved, ranks):
    run_ranks(ranks, load, saved)


def test_saved_on_a_mesh_and_loaded_by_others(tmp_path):
    run_ranks(4, save, tmp_path, (2, 2))
    run_ranks(3, load, tmp_path)


def damage(saved: Path, folder: Path) -> None:
    sharded, optimizer = make()
    good = saved / "ours"
    sharded.load(good, optimizer)
    sharded.save(folder / "alone")
    if dist.get_rank() == 0:
        shutil.copytree(good, folder / "cut")
        os.truncate(folder / "cut" / "__1_0.distcp", 1000)
    dist.barrier()
    other = FSDP(build(CASES["mlp"]))
    for expected, do in {
        "nowhere holds no checkpoint": lambda: sharded.load(folder / "nowhere"),
        "cut short: __1_0.distcp has 1000 bytes": lambda: sharded.load(folder / "cut", optimizer),
        "of another model: one of them lacks '0.bias'": lambda: other.load(good),
        "of another optimizer, with other parameters": lambda: sharded.load(good, adam(other)),
        "none of the parameters() here": lambda: sharded.save(good, torch.optim.Adam([torch.ones(2)])),
        "saved without an optimizer": lambda: sharded.load(folder / "alone", optimizer),
        "exists and is not a checkpoint": lambda: sharded.save(folder),
        "size mismatch for blocks.0.weight": lambda: sharded.load_state_dict(
            {"blocks.0.weight": torch.ones(3)}, strict=False
        ),
    }.items():
        said = message_of(do)
        assert expected in said and said.startswith(("rank", "Error(s) in loading")), said
    expect(sharded, 3)


def test_checkpoints_that_can_not_be_loaded(saved, tmp_path):
    run_ranks(2, damage, saved, tmp_path)


class HalfUsed(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.used(x).square().sum()


def nothing_is_invented(folder: Path) -> None:
    """Saving, also before the first step, and loads that are refused leave the optimizer as it was."""
    models = [FSDP(HalfUsed()) for _ in range(3)]
    _, saving, loading = optimizers = [adam(model) for model in models]

    def step(number: int) -> None:
        models[number](torch.ones(2, 4)).backward()
        models[number].sync_gradients()
        optimizers[number].step()
        optimizers[number].zero_grad()

    models[1].save(folder, saving)
    for number in (0, 1):
        step(number)
    models[1].save(folder, saving)
    groups = torch.optim.AdamW([{"params": [each]} for each in models[2].parameters()], lr=0.1)
    assert "another optimizer, with other parameters or other groups" in message_of(
        lambda: models[2].load(folder, groups)
    )
    assert not groups.state
    models[2].load(folder, loading)
    for number in (0, 1, 2):
        step(number)
    for mine, right in zip(
        (*models[1].parameters(), *models[2].parameters()), 2 * [*models[0].parameters()], strict=True
    ):
        assert torch.equal(mine.to_local(), right.to_local())


def test_the_optimizer_is_saved_as_it_is(tmp_path):
    run_ranks(2, nothing_is_invented, tmp_path / "saved")


def dies_while_saving(folder: Path, when: str) -> None:
    """Rank 1 is killed as it writes, or rank 0 as it puts the new checkpoint in place."""
    sharded, optimizer = make()
    sharded.load(folder / "ours", optimizer)

    def die(*_, **__) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if when == "writing" and dist.get_rank() == 1:
        dcp.FileSystemWriter.write_data = die
    if when == "renaming" and dist.get_rank() == 0:
        rename = os.rename
        os.rename = lambda a, b: die() if str(a).endswith(".partial") else rename(a, b)
    sharded.save(folder / "ours", optimizer, "new")


@pytest.mark.parametrize("when", ["writing", "renaming"])
def test_a_rank_that_is_killed_leaves_the_checkpoint_of_before(saved, tmp_path, when):
    shutil.copytree(saved / "ours", tmp_path / "ours")
    with pytest.raises(RankFailed) as failed:
        run_ranks(2, dies_while_saving, tmp_path, when, timeout=30)
    assert failed.value.failures[0 if when == "renaming" else 1] == "died with exit code -9"
    run_ranks(1, lambda: load_ours(tmp_path, *make(1)))
