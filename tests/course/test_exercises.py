"""References pass, wrong answers are refused for the right reason, other right ones pass, stubs are for people.

One group of ranks judges all answers of a lesson in a row: so each also shows that the one before left the process
group working. A lesson brings its exercises and its two files of answers, and nothing else.
"""

import ast
import importlib
import pkgutil

import pytest

from scratch_ddp.course import lessons
from scratch_ddp.course.exercise import all_exercises
from tests.course.answers import answers_in, cell, examined, on_ranks

EXERCISES = all_exercises()
WRONG = answers_in("wrong_answers", "WRONG_ANSWERS")
RIGHT = answers_in("right_answers", "RIGHT_ANSWERS")
HANG = 1.5  # seconds; a hang is bounded by 5 in a notebook
LESSONS = {
    each.name: [exercise.name for exercise in importlib.import_module(f"{lessons.__name__}.{each.name}").EXERCISES]
    for each in pkgutil.iter_modules(lessons.__path__)
}


def judged(n, cells, backend=None):
    """The verdicts on these (name, source) on n ranks. A hang need not take the time that it takes in a notebook."""
    options = {"backend": backend} if backend else {}
    return on_ranks(n, lambda: [examined(source, name, HANG) for name, source in cells], timeout=300, **options)


@pytest.mark.parametrize("lesson", LESSONS)
@pytest.mark.parametrize("n", [2, 3, 4])
def test_references_and_other_right_answers_pass(lesson, n):
    cells = [(name, EXERCISES[name].answer_cell()) for name in LESSONS[lesson]]
    cells += [(name, cell(EXERCISES[name], each)) for name in LESSONS[lesson] for each in RIGHT.get(name, ())]
    verdicts = judged(n, cells)
    refused = {source: each.lines for (_, source), each in zip(cells, verdicts, strict=True) if not each.passed}
    assert not refused


@pytest.mark.parametrize("lesson", LESSONS)
@pytest.mark.parametrize("n", [2, 4])
def test_wrong_answers_are_refused_for_the_right_reason(lesson, n):
    wrong = [(name, each) for name in LESSONS[lesson] for each in WRONG[name] if n in each.n]
    verdicts = judged(n, [(name, each.cell(EXERCISES[name])) for name, each in wrong])
    missed = [
        (name, each.mistake, verdict.lines)
        for (name, each), verdict in zip(wrong, verdicts, strict=True)
        if each.says not in verdict.criteria.get(each.fails, "")
    ]
    assert not missed


@pytest.mark.parametrize("lesson", LESSONS)
def test_on_plain_gloo_references_pass_and_the_stubs_are_not_written_yet(lesson):
    cells = [(name, EXERCISES[name].answer_cell()) for name in LESSONS[lesson]]
    stubs = [(name, EXERCISES[name].stub_cell()) for name in LESSONS[lesson]]
    verdicts = judged(3, cells + stubs, backend="gloo")
    assert [each.passed for each in verdicts] == [True] * len(cells) + [False] * len(stubs)
    assert [each.lines for each in verdicts[len(cells) :]] == [["not written yet"]] * len(stubs)


@pytest.mark.parametrize("name", EXERCISES)
def test_a_stub_is_for_people(name):
    """What is asked in at most five lines that a notebook shows whole, and nothing of the answer."""
    source = EXERCISES[name].stub_cell()
    definition = ast.parse(source).body[-1]
    said = [line for line in ast.get_docstring(definition).splitlines() if line]
    assert definition.name == name and len(said) <= 5 and max(map(len, source.splitlines())) <= 88
    assert "raise NotImplementedError  # your code" in source and "answer:" not in source


@pytest.mark.parametrize("name", EXERCISES)
def test_every_exercise_has_honest_mistakes_and_states_the_cost_that_it_checks(name):
    assert len(WRONG[name]) >= 3 and {each.fails for each in WRONG[name]}
    if any(each.fails == "cost" for each in WRONG[name]):
        assert "Cost:" in EXERCISES[name].stub_cell()
