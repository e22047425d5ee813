"""The example in notebooks/adding_an_exercise.md, taken literally, as a lesson outside the package."""

import re
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from scratch_ddp.commands import refresh
from scratch_ddp.commands.grade import HOLDS, grade
from scratch_ddp.commands.notebooks import NOTEBOOKS, exercise_cells
from scratch_ddp.commands.outputs import to_text
from scratch_ddp.course.exercise import all_exercises
from tests.course.answers import examined, on_ranks, read

PAGE = (NOTEBOOKS / "adding_an_exercise.md").read_text(encoding="utf-8")
BEFORE = "from scratch_ddp.course import check, solution"
EXERCISE, MISTAKES = re.findall(r"^```(?:python|text)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture
def lesson(tmp_path) -> Path:
    """A notebook with the exercise, and the page's file beside it."""
    (tmp_path / "lesson_20.py").write_text(EXERCISE)
    cells = ["%load_ext scratch_ddp", "%dist_init -n 2", BEFORE, ""]
    notebook = new_notebook(cells=[new_code_cell(cell) for cell in [*cells, "check(rotate)", "solution(rotate)"]])
    notebook.cells[3].metadata["tags"] = ["exercise:rotate"]
    path = tmp_path / "20_rotate.ipynb"
    path.write_text(to_text(notebook))
    return path


def test_a_lesson_outside_the_package_is_refreshed_and_graded(lesson):
    assert refresh.main([str(lesson)]) == 0
    notebook = nbformat.read(lesson, as_version=4)
    assert "raise NotImplementedError" in notebook.cells[3].source and notebook.cells[2].source == BEFORE
    assert "not written yet" in notebook.cells[4].outputs[0].text
    assert "sending.wait()" in notebook.cells[5].outputs[0].text
    ((exercise, cell),) = exercise_cells(notebook, lesson.parent)
    cell.source = exercise.answer_cell()
    lesson.write_text(to_text(notebook))
    (graded,) = grade(lesson, cell_timeout=60)
    assert graded.status == HOLDS and "✓ cost" in graded.lines[0], graded


def test_its_mistakes_are_refused_for_the_reason_given(lesson):
    exercise, mistakes = all_exercises(lesson.parent)["rotate"], read(MISTAKES)

    def all_verdicts():
        all_exercises()["rotate"] = exercise
        return [examined(each.cell(exercise), "rotate", seconds=1.5) for each in mistakes]

    for wrong, verdict in zip(mistakes, on_ranks(4, all_verdicts), strict=True):
        assert wrong.says in verdict[wrong.fails], verdict
