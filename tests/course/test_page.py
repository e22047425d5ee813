"""The example in notebooks/adding_an_exercise.md, taken literally, as a lesson outside the package."""

import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from scratch_ddp.commands import refresh, stubs
from scratch_ddp.commands.grade import HOLDS, grade
from scratch_ddp.commands.lessons import NOTEBOOKS
from scratch_ddp.commands.outputs import to_text
from scratch_ddp.course.exercise import all_exercises
from tests.course.answers import define, examined, on_ranks
from tests.notebooks.test_form import WIDTH

PAGE = (NOTEBOOKS / "adding_an_exercise.md").read_text(encoding="utf-8")
REFERENCE, EXAMINE, WRONG_ANSWERS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture
def lesson(tmp_path) -> Path:
    """A notebook with the exercise, and the page's module beside it."""
    (tmp_path / "lesson_20.py").write_text(f"{REFERENCE}\n\n{EXAMINE}")
    cells = ["%load_ext scratch_ddp", "%dist_init -n 2", "from scratch_ddp.course import check, solution", ""]
    notebook = new_notebook(cells=[new_code_cell(cell) for cell in [*cells, "check(rotate)", "solution(rotate)"]])
    notebook.cells[3].metadata["tags"] = ["exercise:rotate"]
    path = tmp_path / "20_rotate.ipynb"
    path.write_text(to_text(notebook))
    return path


def test_a_lesson_outside_the_package_is_refreshed_and_graded(lesson):
    assert refresh.main([str(lesson)]) == 0
    notebook = nbformat.read(lesson, as_version=4)
    stub = notebook.cells[3].source
    assert "raise NotImplementedError" in stub and max(map(len, stub.splitlines())) <= WIDTH
    assert "not written yet" in notebook.cells[4].outputs[0].text
    assert "sending.wait()" in notebook.cells[5].outputs[0].text
    assert stubs.write_answers(notebook, lesson.parent) == ["rotate"]
    lesson.write_text(to_text(notebook))
    (exercise,) = grade(lesson, cell_timeout=60).exercises
    assert exercise.status == HOLDS, exercise


def test_its_wrong_answers_are_refused_for_the_reason_given(lesson):
    exercise = all_exercises(lesson.parent)["rotate"]
    wrong_answers = define(WRONG_ANSWERS)["WRONG_ANSWERS"]["rotate"]

    def all_verdicts():
        all_exercises()["rotate"] = exercise
        cells = [wrong.cell(exercise) for wrong in wrong_answers] + [exercise.answer_cell()]
        return [examined(cell, "rotate") for cell in cells]

    *verdicts, right = on_ranks(4, all_verdicts)
    assert right.passed, right.lines
    for wrong, verdict in zip(wrong_answers, verdicts, strict=True):
        assert [criterion for criterion, complaint in verdict.criteria.items() if complaint] == [wrong.fails]
        assert wrong.says in "\n".join(verdict.lines)


def test_it_is_in_the_form_that_ruff_asks_for(lesson):
    files = [lesson.with_name("lesson_20.py"), lesson.with_name("wrong_answers.py")]
    files[1].write_text(WRONG_ANSWERS)
    for command in (["check"], ["format", "--check"]):
        options = ["--config", str(NOTEBOOKS.parent / "pyproject.toml"), *map(str, files)]
        subprocess.run([sys.executable, "-m", "ruff", *command, *options], check=True)
