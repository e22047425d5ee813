"""Unusual answers that are right must pass."""

import importlib
import pkgutil
import re
import textwrap

import pytest

from scratch_ddp.course.exercise import Exercise, all_exercises
from tests.course import right_answers
from tests.course.answers import examined, on_ranks
from tests.course.wrong_answer import edited, rewritten

RANKS = {"hierarchical_all_reduce": 4}  # 3 of them are on one host, or each on a host of its own
EXERCISES = all_exercises()
ANSWERS = {}  # by exercise
for each in pkgutil.iter_modules(right_answers.__path__):
    ANSWERS |= importlib.import_module(f"{right_answers.__name__}.{each.name}").RIGHT_ANSWERS


def cell(exercise: Exercise, answer: dict[str, str] | str) -> str:
    """The cell of an answer: edits of the reference, a whole cell if it defines the function, or else a body."""
    if isinstance(answer, dict):
        return exercise.cell(edited(exercise.reference, answer))
    answer = textwrap.dedent(answer)
    is_cell = re.search(rf"^(def|class) {exercise.name}\b", answer, re.MULTILINE)
    return answer if is_cell else exercise.cell(rewritten(exercise.reference, answer))


@pytest.mark.parametrize("name", ANSWERS)
def test_unusual_answers_that_are_right_pass(name):
    cells = [cell(EXERCISES[name], answer) for answer in ANSWERS[name]]
    verdicts = on_ranks(RANKS.get(name, 3), lambda: [examined(each, name) for each in cells])
    refused = {number: verdict.lines for number, verdict in enumerate(verdicts) if not verdict.passed}
    assert not refused


def test_every_exercise_has_right_answers():
    assert ANSWERS.keys() == EXERCISES.keys()
