"""References and other right answers pass, honest mistakes are refused for the right reason, stubs are for people.

One group of ranks judges all answers of a lesson in a row: so each also shows that the one before left the process
group working. A lesson brings its exercises and their answers, and nothing else.
"""

import ast
import importlib
import pkgutil

import pytest

from scratch_ddp.cells.rank.interruptible_group import BACKEND
from scratch_ddp.course import lessons
from scratch_ddp.course.check import lines
from scratch_ddp.course.exercise import all_exercises
from tests.course.answers import all_answers, examined, on_ranks

EXERCISES, ANSWERS = all_exercises(), all_answers()
HANG = 1.5  # seconds; a hang is bounded by more in a notebook
LESSONS = {
    each.name: [exercise.name for exercise in importlib.import_module(f"{lessons.__name__}.{each.name}").EXERCISES]
    for each in pkgutil.iter_modules(lessons.__path__)
}


def judged(n, cells, backend=BACKEND):
    """The verdicts on these (name, source) on n ranks."""

    def verdicts():
        return [examined(source, name, HANG) for name, source in cells]

    return on_ranks(n, verdicts, backend=backend, timeout=300)


def answers_to(lesson):
    return [each for each in ANSWERS if each.name in LESSONS[lesson]]


@pytest.mark.parametrize("lesson", LESSONS)
@pytest.mark.parametrize("n", [2, 3, 4])
def test_references_and_other_right_answers_pass(lesson, n):
    cells = [(name, EXERCISES[name].answer_cell()) for name in LESSONS[lesson]]
    cells += [(each.name, each.cell(EXERCISES[each.name])) for each in answers_to(lesson) if not each.fails]
    assert not [(cell, said) for cell, said in zip(cells, judged(n, cells), strict=True) if any(said.values())]


@pytest.mark.parametrize("lesson", LESSONS)
@pytest.mark.parametrize("n", [2, 4])
def test_mistakes_are_refused_for_the_right_reason(lesson, n):
    wrong = [each for each in answers_to(lesson) if each.fails and n in each.n]
    verdicts = judged(n, [(each.name, each.cell(EXERCISES[each.name])) for each in wrong])
    pairs = zip(wrong, verdicts, strict=True)
    assert not [(each, verdict) for each, verdict in pairs if each.says not in verdict.get(each.fails, "")]


@pytest.mark.parametrize("lesson", LESSONS)
def test_on_plain_gloo_references_pass_and_the_stubs_are_not_written_yet(lesson):
    cells = [(name, EXERCISES[name].answer_cell()) for name in LESSONS[lesson]]
    assert not any(any(verdict.values()) for verdict in judged(3, cells, "gloo"))
    stubs = [(name, EXERCISES[name].stub_cell()) for name in LESSONS[lesson]]
    assert [lines(verdict) for verdict in judged(3, stubs, "gloo")] == [["not written yet"]] * len(stubs)


@pytest.mark.parametrize("name", EXERCISES)
def test_a_stub_is_for_people_and_its_check_knows_honest_mistakes(name):
    """What is asked in at most five lines that a notebook shows whole, the cost if it counts, nothing of the answer."""
    source, wrong = EXERCISES[name].stub_cell(), [each for each in ANSWERS if each.name == name and each.fails]
    definition = ast.parse(source).body[-1]
    said = [line for line in ast.get_docstring(definition).splitlines() if line]
    assert definition.name == name and len(said) <= 5 and max(map(len, source.splitlines())) <= 88
    assert "raise NotImplementedError  # your code" in source and "answer:" not in source
    assert len(wrong) >= 3 and ("Cost:" in source or "cost" not in {each.fails for each in wrong})
