"""The capstone's judge of a script: each planted fault is found by what the ranks do, and a hang is ended and named."""

import pytest

from scratch_ddp.commands.notebooks import NOTEBOOKS
from scratch_ddp.course.capstone import script
from tests.course.answers import edited

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
    path = tmp_path / "misbehaving.py"
    path.write_text(edited(edited(GIVEN.read_text(), MENDS.strip()), edit))
    found = script.judge(path)
    assert {each for each, complaint in found.items() if complaint} == {fails} - {""}, found
    assert not fails or words in found[fails]


def test_the_script_that_learners_get_fails_everywhere_and_is_ended():
    found = script.judge(GIVEN, waits=3.0)
    assert "is not the mean over the ranks" in found["replicas"]
    assert "items, 128 of them more than once" in found["data"]
    assert "rank 0 waits at" in found["ends"] and "rank 1 waits at" in found["ends"]
