"""Every lesson, run with the reference answers in its exercises' cells: every check passes."""

import nbformat
import pytest

from scratch_ddp.commands import stubs as notebooks
from scratch_ddp.commands.execution import run
from scratch_ddp.commands.grade import HOLDS, exercises_of
from scratch_ddp.commands.lessons import lesson_paths
from scratch_ddp.commands.outputs import clear_outputs


def with_exercises():
    for path in lesson_paths():
        if notebooks.exercise_cells(nbformat.read(path, as_version=4)):
            yield pytest.param(path, id=path.stem)


LESSONS = list(with_exercises()) or [pytest.param(None, marks=pytest.mark.skip("no lesson has exercises"))]


@pytest.mark.parametrize("path", LESSONS)
def test_with_the_reference_answers_every_check_of_the_lesson_passes(path):
    notebook = nbformat.read(path, as_version=4)
    clear_outputs(notebook)
    assert notebooks.write_answers(notebook)
    run(notebook, path.parent, cell_timeout=120)
    verdicts = list(exercises_of(notebook))
    assert {verdict.name for verdict in verdicts} == set(notebooks.exercise_cells(notebook))
    assert all(verdict.status == HOLDS for verdict in verdicts), verdicts
