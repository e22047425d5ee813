"""References pass, wrong answers are refused for the right reason, stubs are `not written yet`."""

import ast

import pytest
import torch.distributed as dist

from scratch_ddp.course.exercise import all_exercises
from tests.course.answers import BACKEND, examined, on_ranks
from tests.course.wrong_answer import all_wrong_answers
from tests.ranks import run_ranks

EXERCISES = all_exercises()
WRONG_ANSWERS = all_wrong_answers()
NAMES = list(EXERCISES)
SEED = 1  # of drawn inputs: which case an answer fails first depends on it
HANG = 1.5  # seconds; a hang is bounded by 5 in a notebook


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("n", [2, 3, 4])
def test_the_reference_passes(name, n):
    verdict = on_ranks(n, examined, EXERCISES[name].answer_cell(), name)
    assert verdict.passed, verdict.lines


def test_an_exercise_that_makes_groups_can_be_checked_again():
    cell = EXERCISES["get"].answer_cell()
    assert all(verdict.passed for verdict in on_ranks(4, lambda: [examined(cell, "get") for _ in range(3)]))


def test_a_check_leaves_no_group_that_only_some_ranks_have():
    """Then torch would give other names to the next group of some ranks on some of them, which waits for ever."""

    def on_rank():
        for name in ("get", "tree_broadcast"):
            assert examined(EXERCISES[name].answer_cell(), name).passed
        some = dist.new_group([0, 1], use_local_synchronization=True) if dist.get_rank() < 2 else None
        return None if some is None else dist.get_world_size(some)

    assert run_ranks(4, on_rank, backend=BACKEND) == [2, 2, None, None]


def test_references_pass_on_plain_gloo_too():
    def all_lines():
        return [examined(exercise.answer_cell(), name).lines for name, exercise in EXERCISES.items()]

    for lines in on_ranks(3, all_lines, backend="gloo"):
        assert len(lines) == 1 and lines[0].startswith("✓")


@pytest.mark.parametrize("name", NAMES)
def test_wrong_answers_are_refused_for_the_right_reason(name):
    """One after the other on the same ranks: so each also shows that the one before left the process group working."""
    exercise, wrong_answers = EXERCISES[name], WRONG_ANSWERS[name]

    def all_verdicts():
        limits = [HANG if wrong.fails == "runs" else 10 for wrong in wrong_answers]
        cells = [wrong.cell(exercise) for wrong in wrong_answers] + [exercise.answer_cell()]
        return [examined(cell, name, seconds, SEED) for cell, seconds in zip(cells, [*limits, 10], strict=True)]

    *verdicts, last = on_ranks(4, all_verdicts)
    assert last.passed, last.lines
    assert len(verdicts) >= 3
    for wrong, verdict in zip(wrong_answers, verdicts, strict=True):
        failed = {criterion for criterion, complaint in verdict.criteria.items() if complaint}
        assert failed == {wrong.fails, *wrong.also}, (wrong.mistake, verdict.lines)
        assert wrong.says in "\n".join(verdict.lines), (wrong.mistake, verdict.lines)


def test_the_stubs_are_not_written_yet():
    def all_lines():
        return [examined(exercise.stub_cell(), name).lines for name, exercise in EXERCISES.items()]

    assert on_ranks(2, all_lines) == [["not written yet"]] * len(EXERCISES)


@pytest.mark.parametrize("name", NAMES)
def test_a_stub_says_what_is_asked_and_nothing_of_the_answer(name):
    cell = EXERCISES[name].stub_cell()
    definition = ast.parse(cell).body[-1]
    assert definition.name == name and not definition.decorator_list and ast.get_docstring(definition)
    assert "raise NotImplementedError  # your code" in cell and "answer:" not in cell
    assert max(map(len, cell.splitlines())) <= 120


def test_a_budget_is_shown_before_it_is_checked():
    """Every exercise that is refused for its cost states the cost in the stub's docstring."""
    costly = [EXERCISES[name] for name, wrong in WRONG_ANSWERS.items() if any(each.fails == "cost" for each in wrong)]
    assert len(costly) >= 7
    for exercise in costly:
        assert "Cost:" in exercise.stub_cell(), exercise.name
