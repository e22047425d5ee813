"""Exercises in notebooks: the stubs there are the generated ones, and stubs and answers find their cells by the tag."""

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from scratch_ddp.commands import notebooks
from scratch_ddp.commands.grade import exercises_of
from scratch_ddp.commands.notebooks import lesson_paths
from scratch_ddp.commands.outputs import to_text
from scratch_ddp.commands.refresh import refresh
from scratch_ddp.course.exercise import all_exercises

LESSONS = {path.stem: nbformat.read(path, as_version=4) for path in lesson_paths()}
WITH_EXERCISES = [name for name, lesson in LESSONS.items() if notebooks.exercise_cells(lesson)]


def notebook_with(*tags: str):
    cells = [new_code_cell("x = 1", metadata={"tags": ["other", tag]}) for tag in tags]
    return new_notebook(cells=[new_markdown_cell("text"), *cells, new_code_cell("'untagged'")])


def test_stubs_and_answers_go_into_the_tagged_cells_and_nowhere_else():
    notebook = notebook_with("exercise:reduce", "exercise:get")
    notebooks.write_stubs(notebook)
    assert notebook.cells[1].source == all_exercises()["reduce"].stub_cell()
    notebooks.write_answers(notebook)
    assert notebook.cells[1].source == all_exercises()["reduce"].answer_cell()
    assert [notebook.cells[0].source, notebook.cells[3].source] == ["text", "'untagged'"]


@pytest.mark.parametrize("tags", [["exercise:no_such"], ["exercise:get", "exercise:get"]])
def test_a_tag_that_fits_no_exercise_or_stands_twice_is_refused(tags):
    with pytest.raises(ValueError, match=tags[0]):
        notebooks.write_stubs(notebook_with(*tags))


def test_refresh_rewrites_the_stubs_of_a_notebook(tmp_path):
    path = tmp_path / "00_mine.ipynb"
    path.write_text(to_text(notebook_with("exercise:get")))
    assert [refresh(path), refresh(path)] == [True, False]
    assert nbformat.read(path, as_version=4).cells[1].source == all_exercises()["get"].stub_cell()


@pytest.mark.parametrize(
    "name", WITH_EXERCISES or [pytest.param("", marks=pytest.mark.skip("no lesson has exercises"))]
)
def test_the_stubs_in_the_lessons_are_the_generated_ones_and_each_is_checked(name):
    lesson = LESSONS[name]
    for exercise, cell in notebooks.exercise_cells(lesson).items():
        assert cell.source == all_exercises()[exercise].stub_cell(), "run python3 -m scratch_ddp refresh"
    checked = {exercise.name for exercise in exercises_of(lesson)}
    assert checked == set(notebooks.exercise_cells(lesson))
