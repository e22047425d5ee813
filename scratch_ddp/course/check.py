"""`check`: run a learner's function on all ranks, say which criteria hold, and leave the process group working."""

import contextlib
import numbers
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from scratch_ddp.course import exercise as source
from scratch_ddp.course.exercise import Exercise, exercise_of
from scratch_ddp.course.meeting import Meeting, RanksMissing, interruptible_default_group, make_anew, renew
from scratch_ddp.course.trial import GRACE, AnswerFailed, Trial
from scratch_ddp.course.verdict import Verdict, ranks

SECONDS = 5.0  # that one call of an answer may take


def check(function: Callable, seconds: float = SECONDS) -> None:
    """Print which criteria a learner's function meets: the same lines on every rank. Call it on all ranks.

    `not written yet` while it is the stub everywhere. A call of the function is ended after `seconds`, if it waits or
    computes in the default group; the process group works afterwards, whatever it did.
    """
    print("\n".join(examine(function, seconds).lines))


def solution(function: Callable) -> None:
    """Print the reference of an exercise, given the learner's function."""
    print(source.answer(exercise_of(function).reference).rstrip("\n"))


def examine(function: Callable, seconds: float = SECONDS) -> Verdict:
    """As `check`, but return the verdict, the same on every rank, and print nothing.

    Raises TypeError or ValueError for what is no exercise, RuntimeError where there are fewer than two ranks or some of
    them do not come.
    """
    exercise = exercise_of(function)
    if not dist.is_initialized() or dist.get_world_size() < 2:
        raise RuntimeError("an exercise is checked on two or more ranks: start them with %dist_init -n 4")
    try:
        meeting = Meeting(seconds + GRACE)
    except RanksMissing as error:
        raise RuntimeError(
            f"check({exercise.name}) runs on every rank: {ranks(error.missing).lower()} did not come within "
            f"{error.seconds:g} s. Run the cell without %%rank."
        ) from None
    try:
        return _examine(function, exercise, meeting, seconds)
    finally:
        meeting.close()


def _examine(function: Callable, exercise: Exercise, meeting: Meeting, seconds: float) -> Verdict:
    facts = meeting.exchange({"name": exercise.name, "stub": source.is_stub(function, exercise.reference)}, GRACE)
    if len({fact["name"] for fact in facts}) > 1:
        names = ", ".join(f"rank {rank} {fact['name']}" for rank, fact in enumerate(facts))
        return Verdict({"runs": f"The ranks check different functions: {names}."})
    unwritten = [rank for rank, fact in enumerate(facts) if fact["stub"]]
    if len(unwritten) == meeting.size:
        return Verdict()
    if unwritten:
        still = "has" if len(unwritten) == 1 else "have"
        return Verdict({"written": f"{ranks(unwritten)} still {still} the stub: run your cell on every rank."})
    backend = dist.get_backend()
    with interruptible_default_group():
        trial = Trial(function, meeting, seconds)
        with contextlib.suppress(AnswerFailed):
            exercise.examine(trial)
        verdict = trial.verdict()
        if trial.ranks_missing:
            return verdict.with_note("Press Stop, then run the cells again.")
        destroyed = any(meeting.exchange(not dist.is_initialized(), GRACE))
        if trial.spoiled and not destroyed:
            verdict = verdict.with_note(renew(seconds + GRACE))
    return verdict.with_note(make_anew(meeting, backend)) if destroyed else verdict


# FOLDED: `reveal`: a guess beside what was measured.


def reveal(guess: Any, measured: Any) -> None:
    """Print the guess beside the measurement: two numbers, texts or truth values, or two lists of them, row by row.

    None stands for no guess. Raises TypeError, before it shows anything, if a guess is of another kind than what
    was measured, ValueError if it has another number of rows.
    """
    guess, measured = _plain(guess), _plain(measured)
    if guess is None or not isinstance(measured, list):
        print(_line(guess, measured))
        return
    _check_kind(guess, measured)
    if len(guess) != len(measured):
        raise ValueError(f"your guess has {len(guess)} rows, the measurement {len(measured)}")
    lines = [_line(one, other) for one, other in zip(guess, measured, strict=True)]
    print("\n".join(f"{row}: {line}" for row, line in enumerate(lines)))


def _line(guess: Any, measured: Any) -> str:
    if guess is None:
        return f"no guess made · measured {_shown(measured)}"
    _check_kind(guess, measured)
    if guess == measured:
        return f"guess {_shown(guess)} · measured {_shown(measured)}: as guessed"
    both = isinstance(measured, numbers.Real) and not isinstance(measured, bool) and guess and measured
    ratio = f": {measured / guess:.3g} times the guess" if both else ""
    return f"guess {_shown(guess)} · measured {_shown(measured)}{ratio}"


def _check_kind(guess: Any, measured: Any) -> None:
    if _kind(guess) != _kind(measured):
        raise TypeError(f"your guess is {_kind(guess)} ({guess!r}), what was measured is {_kind(measured)}: guess that")


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "True or False"
    if isinstance(value, numbers.Real):
        return "a number"
    return {str: "a text", list: "a list"}.get(type(value), f"a {type(value).__name__}")


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor) or type(value).__module__ == "numpy":
        return value.tolist()
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value


def _shown(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return str(value)
    return f"{value:,}" if isinstance(value, numbers.Integral) else f"{value:,.6g}"
