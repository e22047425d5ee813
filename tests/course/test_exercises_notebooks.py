"""Exercises in notebooks: the stubs there are the generated ones, and they find their cells by the tag."""

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from scratch_ddp.commands.grade import exercises_of
from scratch_ddp.commands.notebooks import exercise_cells, lesson_paths
from scratch_ddp.commands.outputs import to_text
from scratch_ddp.commands.refresh import refresh
from scratch_ddp.course.exercise import all_exercises


def notebook_with(*tags: str):
    cells = [new_code_cell("x = 1", metadata={"tags": ["other", tag]}) for tag in tags]
    return new_notebook(cells=[new_markdown_cell("text"), *cells, new_code_cell("'untagged'")])


def test_stubs_go_into_the_tagged_cells_and_nowhere_else(tmp_path):
    notebook, stub = notebook_with("exercise:send_rows", "exercise:get"), all_exercises()["send_rows"].stub_cell()
    path = tmp_path / "00_mine.ipynb"
    path.write_text(to_text(notebook))
    assert [refresh(path), refresh(path)] == [True, False]
    saved = [cell.source for cell in nbformat.read(path, as_version=4).cells]
    assert saved[1] == stub and [saved[0], saved[3]] == ["text", "'untagged'"]
    with pytest.raises(KeyError, match="no_such"):
        exercise_cells(notebook_with("exercise:no_such"))


@pytest.mark.parametrize("path", lesson_paths(), ids=lambda path: path.stem)
def test_the_stubs_in_the_lessons_are_the_generated_ones_and_each_is_checked(path):
    lesson = nbformat.read(path, as_version=4)
    tagged = exercise_cells(lesson)
    for exercise, cell in tagged:
        assert cell.source == exercise.stub_cell(), "run python3 -m scratch_ddp refresh"
    assert sorted(each.name for each in exercises_of(lesson)) == sorted(exercise.name for exercise, _ in tagged)
