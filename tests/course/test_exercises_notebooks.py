"""Exercises in notebooks: the stubs there are the generated ones, and stubs and answers find their cells by the tag."""

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from scratch_ddp.commands import notebooks
from scratch_ddp.commands.grade import exercises_of
from scratch_ddp.commands.outputs import to_text
from scratch_ddp.commands.refresh import refresh
from scratch_ddp.course.exercise import all_exercises


def notebook_with(*tags: str):
    cells = [new_code_cell("x = 1", metadata={"tags": ["other", tag]}) for tag in tags]
    return new_notebook(cells=[new_markdown_cell("text"), *cells, new_code_cell("'untagged'")])


def test_stubs_and_answers_go_into_the_tagged_cells_and_nowhere_else(tmp_path):
    notebook, stub = notebook_with("exercise:reduce", "exercise:get"), all_exercises()["reduce"].stub_cell()
    path = tmp_path / "00_mine.ipynb"
    path.write_text(to_text(notebook))
    assert [refresh(path), refresh(path)] == [True, False]
    assert nbformat.read(path, as_version=4).cells[1].source == stub
    notebooks.write_answers(notebook)
    assert notebook.cells[1].source == all_exercises()["reduce"].answer_cell()
    assert [notebook.cells[0].source, notebook.cells[3].source] == ["text", "'untagged'"]


@pytest.mark.parametrize("tags", [["exercise:no_such"], ["exercise:get", "exercise:get"]])
def test_a_tag_that_fits_no_exercise_or_stands_twice_is_refused(tags):
    with pytest.raises(ValueError, match=tags[0]):
        notebooks.write_stubs(notebook_with(*tags))


@pytest.mark.parametrize("path", notebooks.lesson_paths(), ids=lambda path: path.stem)
def test_the_stubs_in_the_lessons_are_the_generated_ones_and_each_is_checked(path):
    lesson = nbformat.read(path, as_version=4)
    stubs = {name: cell.source for name, cell in notebooks.exercise_cells(lesson).items()}
    assert stubs == {name: all_exercises()[name].stub_cell() for name in stubs}, "run python3 -m scratch_ddp refresh"
    assert {exercise.name for exercise in exercises_of(lesson)} == set(stubs)
