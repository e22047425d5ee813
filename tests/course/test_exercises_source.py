"""Stub, answer and wrong answers are made from the one reference, or it is said why they can't be."""

import functools

import pytest

from scratch_ddp.course import examine, exercise
from scratch_ddp.course.exercise import Exercise, all_exercises
from scratch_ddp.course.trial import Trial
from tests.course.answers import define, on_ranks
from tests.course.wrong_answer import WrongAnswer, edited
from tests.ranks import RankFailed


def logged(function):
    @functools.wraps(function)
    def wrapper(*args):
        return function(*args)

    return wrapper


@logged
@logged
def double(x):
    """Twice x."""
    y = x
    # answer: begin
    if y:
        y = y + x
    # answer: end
    return y


class Account:
    # Two methods to write.
    def __init__(self):
        # answer: begin
        self.sum = 0
        # answer: end

    @property
    def empty(self):
        # answer: begin
        return self.sum == 0
        # answer: end


def unmarked(x):
    return x


def half_marked(x):
    # answer: begin
    return x


def examine_double(trial: Trial) -> None:
    trial.value(trial.call(3), 6)


DOUBLE = Exercise(double, examine_double, given="from math import ceil")


def test_a_decorated_reference_yields_a_clean_stub():
    assert exercise.stub(double) == (
        'def double(x):\n    """Twice x."""\n    y = x\n    raise NotImplementedError  # your code\n    return y\n'
    )
    assert exercise.answer(double) == (
        'def double(x):\n    """Twice x."""\n    y = x\n    if y:\n        y = y + x\n    return y\n'
    )


def test_a_class_may_leave_several_answers_open():
    stub = exercise.stub(Account)
    assert stub.startswith("class Account:\n") and stub.count(exercise.YOUR_CODE) == 2
    assert "    @property\n    def empty(self):\n        raise NotImplementedError" in stub
    assert "self.sum" not in stub and "return self.sum == 0" in exercise.answer(Account)


@pytest.mark.parametrize("reference", [unmarked, half_marked])
def test_a_reference_without_its_two_markers_is_refused(reference):
    with pytest.raises(ValueError, match="must stand between `# answer: begin` and `# answer: end`"):
        exercise.stub(reference)


def test_an_edit_changes_the_answer_only():
    assert "    y = x\n    if y:\n        y = x + 1" in edited(double, {"y = y + x": "y = x + 1"})


@pytest.mark.parametrize(("old", "times"), [("no longer there", 0), ("y", 3), ("return y", 0)])
def test_an_edit_that_does_not_apply_once_is_refused(old, times):
    with pytest.raises(ValueError, match=f"stands {times} times in the answer"):
        WrongAnswer("?", "value", "?", edits={old: "x"}).cell(DOUBLE)


def test_a_body_takes_the_place_of_the_answer():
    cell = WrongAnswer("?", "value", "?", body="\n        if y:\n            y = 1\n    ").cell(DOUBLE)
    head = 'from math import ceil\n\n\ndef double(x):\n    """Twice x."""\n    y = x\n'
    assert cell == head + "    if y:\n        y = 1\n    return y"


def test_comments_and_docstring_do_not_make_a_stub_an_answer():
    stub = exercise.stub(double)
    commented = stub.replace('"Twice x."', '"Mine."').replace("# your code", "# later")
    for text, is_stub in [(stub, True), (commented, True), (exercise.answer(double), False)]:
        assert exercise.is_stub(define(text)["double"], double) is is_stub
    assert not exercise.is_stub(print, double)  # no source to read


def test_a_test_that_is_itself_wrong_is_an_error_and_no_verdict():
    """An exercise's own mistake must not be blamed on the learner."""

    def on_rank():
        def examine_wrongly(trial: Trial) -> None:
            raise KeyError("mine")

        all_exercises()["double"] = Exercise(double, examine_wrongly)
        return examine(double)

    with pytest.raises(RankFailed, match="KeyError: 'mine'"):
        on_ranks(2, on_rank)
