"""The capstone's judge of a script: each planted fault is found by what the ranks do, and a hang is ended and named."""

import importlib
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from scratch_ddp.commands.lessons import NOTEBOOKS
from scratch_ddp.course.capstone import observe, script
from scratch_ddp.course.capstone.torchrun import STUCK, Ended
from tests.ranks import RankFailed, run_ranks

GIVEN = NOTEBOOKS / "capstone" / "misbehaving.py"
MENDED = Path(script.__file__).with_name("reference_script.py")
ZERO = "            parameter.grad = torch.zeros_like(parameter)  # every rank makes the same calls\n"
SHARE = "    order = order[dist.get_rank() :: dist.get_world_size()]\n"
EVALUATE = "        accuracy = evaluate(model, *validation_data)  # on every rank: it has a collective\n"
AVERAGE = "        average_gradients(model)\n        optimizer.step()\n"
FAULTS = {  # what is undone or done instead: (edits of the mended script, the one criterion that fails, its words)
    "nothing": ({}, "", ""),
    "nothing: torch's own class averages": (
        {
            "(model.parameters(), lr": "((model := DDP(model, find_unused_parameters=True)).parameters(), lr",
            "from torch import nn\n": "from torch import nn\n\nDDP = nn.parallel.DistributedDataParallel\n",
            AVERAGE: "        optimizer.step()\n",
        },
        "",
        "",
    ),
    "a gradient that is missing is left out": (
        {ZERO: "            continue\n"},
        "replicas",
        ".weight that rank 0 steps with is not the mean over the ranks (it was not used on rank ",
    ),
    "rank 0's parameters for all, in place of mean gradients": (
        {AVERAGE: "        optimizer.step()\n        [dist.broadcast(p.data, 0) for p in model.parameters()]\n"},
        "replicas",
        "step 1: the gradient of inside.weight that rank 0 steps with is not the mean",
    ),
    "every rank reads all items": (
        {SHARE: ""},
        "data",
        "128 of rank 1's first 128 items are items of rank 0 too",
    ),
    "every rank reads the first half": (
        {SHARE: "    order = torch.arange(ITEMS // 2)[dist.get_rank() :: dist.get_world_size()].repeat(2)\n"},
        "data",
        "in the first epoch the ranks read 128 of the 256 items",
    ),
    "rank 0 evaluates alone": (
        {EVALUATE: "        accuracy = evaluate(model, *validation_data) if rank == 0 else 0\n"},
        "ends",
        "`dist.all_reduce(right)`; rank 1 waits at misbehaving.py, line ",
    ),
    "nobody evaluates": (
        {EVALUATE: "        accuracy = 0\n"},
        "ends",
        "0 of the 64 validation items are predicted",
    ),
}


def run_on_forked_ranks(path: Path, folder: Path) -> Ended:
    """What `torchrun.run(observe)` does, without torchrun."""
    importlib.import_module("torch._dynamo")  # which optimizers need: once, instead of on each rank

    def observed() -> None:
        dist.init_process_group = lambda *_, **__: None
        dist.destroy_process_group = lambda *_, **__: None
        observe.main(path, folder, patience=3.0)

    try:
        run_ranks(2, observed, timeout=30)
    except RankFailed as failed:
        stuck = {int(file.suffix[1:]): file.read_text() for file in folder.glob(f"{STUCK}.*")}
        return Ended(1, stuck, [str(failed)])
    return Ended(0, {}, [])


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_found_by_its_criterion(name, tmp_path):
    edits, criterion, says = FAULTS[name]
    source, path = MENDED.read_text(), tmp_path / "misbehaving.py"
    for old, new in edits.items():
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    path.write_text(source)
    ended = run_on_forked_ranks(path.resolve(), tmp_path)
    seen = [torch.load(tmp_path / f"{observe.FILE}.{rank}") for rank in range(2)]
    found = script.complaints(seen, ended.complaint)
    assert {each for each, complaint in found.items() if complaint} == {criterion} - {""}, found
    assert not criterion or says in found[criterion]


def test_the_script_that_learners_get_fails_everywhere_under_torchrun_and_is_ended(tmp_path):
    path = tmp_path / "misbehaving.py"
    path.write_text(GIVEN.read_text())
    found = script.judge(path, patience=5.0)
    assert "is not the mean over the ranks" in found["replicas"]
    assert "are items of rank 0 too" in found["data"]
    assert "rank 0 waits at" in found["ends"] and "rank 1 waits at" in found["ends"]
    assert not [each for each in Path("/proc").glob("[0-9]*/cmdline") if str(path).encode() in _read(each)]


def test_a_script_that_does_not_start(tmp_path):
    found = script.complaints([], Ended(1, {}, ["E1 noise", "ModuleNotFoundError: No module named 'torhc'"]).complaint)
    assert set(found.values()) == {"it ended with status 1: ModuleNotFoundError: No module named 'torhc'"}


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes() if file.parent.name != str(os.getpid()) else b""
    except OSError:
        return b""
