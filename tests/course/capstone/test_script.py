"""The capstone's judge of a script: each planted fault is found by what the ranks do, and a hang is ended and named."""

import importlib

import pytest
import torch
import torch.distributed as dist

from scratch_ddp.commands.notebooks import NOTEBOOKS
from scratch_ddp.course.capstone import script, torchrun
from tests.course.answers import edited
from tests.ranks import captured, run_ranks

GIVEN = NOTEBOOKS / "capstone" / "misbehaving.py"
MENDS = """
    continue => parameter.grad = torch.zeros_like(parameter)
    model.train() => order = order[dist.get_rank() :: dist.get_world_size()] ⏎ model.train()
    if rank == 0: => accuracy = evaluate(model, *validation_data) ⏎ if rank == 0:
    {evaluate(model, *validation_data):.3f} => {accuracy:.3f}
"""
EDITS = [  # what is changed in the mended script, the criterion that fails, and its words
    ("parameter.grad = torch.zeros_like(parameter) => parameter.grad = 0 * parameter.detach()", "", ""),
    ("accuracy = evaluate(model, *validation_data) => accuracy = 0", "ends", "0 of the 64 validation items are"),
]


@pytest.mark.parametrize(("edit", "fails", "words"), EDITS)
def test_a_mended_script_holds_and_a_fault_is_found_by_its_criterion(edit, fails, words, tmp_path):
    """On forked ranks, which start sooner than torchrun's."""
    path = tmp_path / "misbehaving.py"
    path.write_text(edited(edited(GIVEN.read_text(), MENDS.strip()), edit))
    importlib.import_module("torch._dynamo")  # which optimizers need: once, instead of on each rank

    def observed() -> int:
        dist.init_process_group = dist.destroy_process_group = lambda *_, **__: None
        try:
            script.main(path, tmp_path)
        except SystemExit as ended:
            return ended.code
        return 0

    results = run_ranks(2, captured, observed, waits=3.0)
    wrong = torchrun.complaint(results[0][0], [line for _, printed in results for line in printed.splitlines()])
    seen = [torch.load(tmp_path / f"seen.{rank}") for rank in range(2)]
    found = script.complaints(seen, wrong)
    assert {each for each, complaint in found.items() if complaint} == {fails} - {""}, found
    assert not fails or words in found[fails]


def test_the_script_that_learners_get_fails_everywhere_under_torchrun_and_is_ended():
    found = script.judge(GIVEN)
    assert "is not the mean over the ranks" in found["replicas"]
    assert "are items of rank 0 too" in found["data"]
    assert "rank 0 waits at" in found["ends"] and "rank 1 waits at" in found["ends"]
