"""The capstone's judge of a script: each planted fault is found by what the ranks do, and a hang is ended and named."""

import importlib

import pytest
import torch
import torch.distributed as dist

from scratch_ddp.commands.notebooks import NOTEBOOKS
from scratch_ddp.course.capstone import observe, script, torchrun
from tests.course.capstone.test_class import edited
from tests.ranks import run_ranks

GIVEN = NOTEBOOKS / "capstone" / "misbehaving.py"
MENDS = {  # the three faults, mended
    "            continue\n": "            parameter.grad = torch.zeros_like(parameter)\n",
    "    model.train()\n": "    order = order[dist.get_rank() :: dist.get_world_size()]\n    model.train()\n",
    "        if rank == 0:\n": "        accuracy = evaluate(model, *validation_data)\n        if rank == 0:\n",
    "{evaluate(model, *validation_data):.3f}": "{accuracy:.3f}",
}
ZERO, SHARE, EVALUATE, _ = MENDS.values()
AVERAGE = "        average_gradients(model)\n"
FAULTS = {  # (edits of the mended script, the one criterion that fails, its words)
    "nothing": ({}, "", ""),
    "a gradient that is missing is left out": (
        {ZERO: "            continue\n"},
        "replicas",
        " that rank 0 steps with is not the mean over the ranks (it was not used on rank ",
    ),
    "nobody averages": ({AVERAGE: ""}, "replicas", "step 1: the gradient of "),
    "every rank reads all items": (
        {SHARE: "    model.train()\n"},
        "data",
        "128 of rank 1's first 128 items are items of rank 0 too",
    ),
    "rank 0 evaluates alone": (
        {EVALUATE: "        accuracy = evaluate(model, *validation_data) if rank == 0 else 0\n        if rank == 0:\n"},
        "ends",
        "rank 1 waits at misbehaving.py, line ",
    ),
    "nobody evaluates": (
        {EVALUATE: "        accuracy = 0\n        if rank == 0:\n"},
        "ends",
        "0 of the 64 validation items are predicted",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_found_by_its_criterion(name, tmp_path):
    """On forked ranks, which start sooner than torchrun's."""
    edits, criterion, says = FAULTS[name]
    path = tmp_path / "misbehaving.py"
    path.write_text(edited(edited(GIVEN.read_text(), MENDS), edits))
    importlib.import_module("torch._dynamo")  # which optimizers need: once, instead of on each rank

    def observed() -> int:
        dist.init_process_group = dist.destroy_process_group = lambda *_, **__: None
        try:
            observe.main(path, tmp_path)
        except SystemExit as ended:
            return ended.code
        return 0

    results = run_ranks(2, observed, capture=True, waits=3.0)
    ended = torchrun.Ended(results[0][0], [line for _, printed in results for line in printed.splitlines()])
    seen = [torch.load(tmp_path / f"seen.{rank}") for rank in range(2)]
    found = script.complaints(seen, ended.complaint)
    assert {each for each, complaint in found.items() if complaint} == {criterion} - {""}, found
    assert not criterion or says in found[criterion]


def test_the_script_that_learners_get_fails_everywhere_under_torchrun_and_is_ended():
    found = script.judge(GIVEN)
    assert "is not the mean over the ranks" in found["replicas"]
    assert "are items of rank 0 too" in found["data"]
    assert "rank 0 waits at" in found["ends"] and "rank 1 waits at" in found["ends"]
