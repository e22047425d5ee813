"""Exercises in notebooks: the stubs there are the generated ones, and they find their cells by the tag."""

import nbformat
import pytest

from scratch_ddp.commands.grade import exercises_of
from scratch_ddp.commands.notebooks import exercise_cells, lesson_paths


@pytest.mark.parametrize("path", lesson_paths(), ids=lambda path: path.stem)
def test_the_stubs_in_the_lessons_are_the_generated_ones_and_each_is_checked(path):
    lesson = nbformat.read(path, as_version=4)
    tagged = exercise_cells(lesson)
    for exercise, cell in tagged:
        assert cell.source == exercise.stub_cell(), "run python3 -m scratch_ddp refresh"
    assert sorted(each.name for each in exercises_of(lesson)) == sorted(exercise.name for exercise, _ in tagged)
