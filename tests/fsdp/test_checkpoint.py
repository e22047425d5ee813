"""A checkpoint to which each rank writes its shards: loaded by any number of ranks, and never lost."""

import os
import pickle
import shutil
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from scratch_ddp.fsdp import FSDP
from tests.ddp.cases import batches, build
from tests.fsdp.cases import CASES, message_of
from tests.ranks import RankFailed, run_ranks

OPTIMIZERS = {
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "plain": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
}
CASE = CASES["tiny parameters"]


def train(sharded: FSDP, optimizer, steps: range) -> None:
    """Every rank has the whole batch, so that any number of them computes the same."""
    data = batches(8, 1)
    for step in steps:
        CASE.loss(sharded, *data[step]).backward()
        sharded.sync_gradients()
        optimizer.step()
        optimizer.zero_grad()


def make(kind: str = "Adam", seed: int = 0, **settings) -> tuple[FSDP, torch.optim.Optimizer]:
    sharded = FSDP(build(CASE, seed), replicated=["blocks.1"], **settings)
    return sharded, OPTIMIZERS[kind](sharded.parameters())


def save(folder: Path, kind: str) -> tuple[dict, dict]:
    sharded, optimizer = make(kind)
    train(sharded, optimizer, range(3))
    optimizer.param_groups[0]["lr"] = 0.005
    sharded.save(folder, optimizer, {"step": 3, "seen": [1, 2]})
    now = sharded.gather_full_params()
    train(sharded, optimizer, range(3, 5))
    return now, sharded.gather_full_params()


def load(folder: Path, kind: str) -> tuple[dict, dict, dict, float]:
    sharded, optimizer = make(kind, seed=1)
    extra = sharded.load(folder, optimizer)
    now = sharded.gather_full_params()
    train(sharded, optimizer, range(3, 5))
    return now, sharded.gather_full_params(), extra, optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_saved_on_two_ranks_and_loaded_on_three(tmp_path, kind):
    now, later = run_ranks(2, save, tmp_path / "step 3", kind)[0]
    assert sorted(os.listdir(tmp_path / "step 3")) == [".metadata", "__0_0.distcp", "__1_0.distcp"]
    assert os.listdir(tmp_path) == ["step 3"]
    for world_size in (1, 3, 4) if kind == "Adam" else (3,):
        for loaded, trained_on, extra, lr in run_ranks(world_size, load, tmp_path / "step 3", kind):
            assert extra == {"step": 3, "seen": [1, 2]} and lr == 0.005
            for name, tensor in loaded.items():
                assert torch.equal(tensor, now[name])
                torch.testing.assert_close(trained_on[name], later[name], rtol=0, atol=1e-12)


def on_first_rank(do) -> None:
    if dist.get_rank() == 0:
        do()
    dist.barrier()


def damage(folder: Path) -> dict[str, str]:
    sharded, optimizer = make()
    train(sharded, optimizer, range(1))
    sharded.save(folder / "good", optimizer)
    sharded.save(folder / "alone")
    before = sharded.gather_full_params()
    said = {"nowhere": message_of(lambda: sharded.load(folder / "nowhere"))}

    def cut(name: str, left: int) -> None:
        os.truncate(folder / "bad" / name, left)

    for kind, change in {
        "no metadata": lambda: os.unlink(folder / "bad" / ".metadata"),
        "short metadata": lambda: cut(".metadata", 200),
        "short shard": lambda: cut("__1_0.distcp", 1000),
        "no shard": lambda: os.unlink(folder / "bad" / "__0_0.distcp"),
        "garbage": lambda: (folder / "bad" / ".metadata").write_bytes(pickle.dumps([1, 2])),
    }.items():
        on_first_rank(lambda change=change: (shutil.copytree(folder / "good", folder / "bad"), change()))
        said[kind] = message_of(lambda: sharded.load(folder / "bad", optimizer))
        on_first_rank(lambda: shutil.rmtree(folder / "bad"))
    other = FSDP(build(CASES["mlp"]))
    said["model"] = message_of(lambda: other.load(folder / "good"))
    said["dtype"] = message_of(lambda: FSDP(build(CASE).float()).load(folder / "good"))
    fewer = torch.optim.Adam(list(sharded.parameters())[:3])
    said["optimizer"] = message_of(lambda: sharded.load(folder / "good", fewer))
    said["foreign"] = message_of(lambda: sharded.save(folder / "good", torch.optim.Adam([torch.ones(2)])))
    said["no optimizer"] = message_of(lambda: sharded.load(folder / "alone", optimizer))
    said["not ours"] = message_of(lambda: sharded.save(folder))
    assert all(torch.equal(before[name], now) for name, now in sharded.gather_full_params().items())
    sharded.load(folder / "good", optimizer)
    return said


def test_checkpoints_that_can_not_be_loaded(tmp_path):
    for said in run_ranks(2, damage, tmp_path):
        assert "nowhere holds no checkpoint" in said["nowhere"] and "has no .metadata" in said["no metadata"]
        assert "that was cut short: .metadata can't be read" in said["short metadata"]
        assert "cut short: __1_0.distcp has 1000 bytes" in said["short shard"]
        assert "cut short: __0_0.distcp has 0 bytes" in said["no shard"] and "cut short" in said["garbage"]
        assert "of another model: it lacks '0.weight'" in said["model"]
        assert "of another dtype: 'scale' is torch.float64 there and torch.float32 here" in said["dtype"]
        assert "of another optimizer: it has groups of [8] parameters, this one has [3]" in said["optimizer"]
        assert "holds a parameter of shape (2,) that is none of the parameters() here" in said["foreign"]
        assert "was saved without an optimizer" in said["no optimizer"]
        assert "exists and is not a checkpoint" in said["not ours"]
        assert all(text.startswith(("rank 0: ", "ranks 0, 1: ")) for text in said.values())


def dies_while_saving(folder: Path, when: str) -> None:
    """Rank 1 is killed as it writes, or rank 0 as it puts the new checkpoint in place."""
    sharded, optimizer = make()
    sharded.load(folder, optimizer)
    train(sharded, optimizer, range(1))
    rank = dist.get_rank()

    def die(*_, **__) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if when == "writing" and rank == 1:
        from torch.distributed.checkpoint import FileSystemWriter

        FileSystemWriter.write_data = die
    if when == "renaming" and rank == 0:
        rename = os.rename
        os.rename = lambda a, b: die() if str(a).endswith(".partial") else rename(a, b)
    if when == "a step":
        if rank == 1:
            sharded.module.blocks[1].register_forward_hook(die)
        train(sharded, optimizer, range(1))
    sharded.save(folder, optimizer, "new")


@pytest.mark.parametrize("when", ["a step", "writing", "renaming"])
def test_a_rank_that_is_killed_leaves_the_checkpoint_of_before(tmp_path, when):
    folder = tmp_path / "latest"
    now, later = run_ranks(2, save, folder, "Adam")[0]
    with pytest.raises(RankFailed) as failed:
        run_ranks(2, dies_while_saving, folder, when, timeout=30)
    assert failed.value.failures[0 if when == "renaming" else 1] == "died with exit code -9"
    loaded, trained_on, extra, _ = run_ranks(3, load, folder, "Adam")[0]
    assert extra == {"step": 3, "seen": [1, 2]}
    for name, tensor in loaded.items():
        assert torch.equal(tensor, now[name])
        torch.testing.assert_close(trained_on[name], later[name], rtol=0, atol=1e-12)
    run_ranks(2, save, folder, "Adam")  # what was left behind is in nobody's way
    assert sorted(os.listdir(tmp_path)) == ["latest"]
