"""`check`: run a learner's function on all ranks, say which criteria hold, and leave the process group working.

An answer passes through `exercise` (which exercise is it?), `meeting` (are all ranks here?), the `examine_…` of its
lesson, `trial` (call it, state criteria), `guard` (what may it not change?), `attempt` (the call itself) and `verdict`
(what all ranks found, as lines).
"""

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from scratch_ddp.course.exercise import Exercise, answer, borrows, exercise_of, is_stub
from scratch_ddp.course.meeting import GRACE, Meeting, RanksMissing, interruptible_default_group, make_anew, renew
from scratch_ddp.course.trial import AnswerFailed, Trial
from scratch_ddp.course.verdict import Verdict
from scratch_ddp.course.wording import ranks
from scratch_ddp.course.worlds import (
    World,
    all_groups,
    another_world,
    destroy_all_but,
    exchange_with_group_count,
    other_worlds,
)
from scratch_ddp.instruments.traffic.intercept import prepared

INSTEAD = Path("solutions.md")  # in the notebook's folder, which is a kernel's current one
SECONDS = 5.0  # that one call of an answer may take
LONGEST = 300.0  # seconds for all calls in the second world


def check(function: Callable, seconds: float = SECONDS, seed: int | None = None) -> None:
    """Print which criteria a learner's function meets: the same lines on every rank. Call it on all ranks.

    Prints `not written yet` while it is the stub on every rank. Each call of the function may take `seconds`: then it
    is ended, if it computes or waits in the default group. Afterwards the process group works, whatever it did.
    Some inputs are drawn anew each time; a complaint names the `seed` that draws the same ones again.
    """
    print("\n".join(examine(function, seconds, seed).lines))


def solution(function: Callable) -> None:
    """Print the reference of an exercise, given the learner's function.

    Where a teacher has put a file `solutions.md` beside the notebook, print that instead.
    """
    exercise = exercise_of(function)
    text = INSTEAD.read_text(encoding="utf-8") if INSTEAD.exists() else answer(exercise.reference)
    print(text.rstrip("\n"))


def examine(function: Callable, seconds: float = SECONDS, seed: int | None = None) -> Verdict:
    """As `check`, but return the verdict, the same on every rank, and print nothing.

    Raises TypeError or ValueError if the function is not an exercise, RuntimeError if there are fewer than two ranks
    or if some ranks do not come.
    """
    exercise = exercise_of(function)
    if not dist.is_initialized() or dist.get_world_size() < 2:
        raise RuntimeError("an exercise is checked on two or more ranks: start them with %dist_init -n 4")
    try:
        meeting = Meeting(seconds + GRACE)
    except RanksMissing as error:
        raise RuntimeError(
            f"check({exercise.name}) runs on every rank: {ranks(error.missing).lower()} did not come within "
            f"{error.seconds:g} s. Run the cell without %%rank. If it failed there, mend that first."
        ) from None
    try:
        return _examine(function, exercise, meeting, seconds, seed)
    finally:
        meeting.close()


def _examine(function: Callable, exercise: Exercise, meeting: Meeting, seconds: float, seed: int | None) -> Verdict:
    own = {
        "name": exercise.name,
        "stub": is_stub(function, exercise.reference),
        "borrows": borrows(function, exercise),
        "seed": time.time_ns() // 1000 % 1_000_000 if seed is None else seed,
    }
    facts = meeting.exchange(own, GRACE)
    if len({fact["name"] for fact in facts}) > 1:
        names = ", ".join(f"rank {rank} {fact['name']}" for rank, fact in enumerate(facts))
        return Verdict({"runs": f"The ranks check different functions: {names}."})
    unwritten = [rank for rank, fact in enumerate(facts) if fact["stub"]]
    if len(unwritten) == meeting.size:
        return Verdict()
    if unwritten:
        still = "has" if len(unwritten) == 1 else "have"
        return Verdict({"written": f"{ranks(unwritten)} still {still} the stub: run your cell on every rank."})
    if borrowed := next((fact["borrows"] for fact in facts if fact["borrows"]), ""):
        return Verdict({"own": f"The answer calls the package's {borrowed}: write it yourself."})
    backend = dist.get_backend()
    with interruptible_default_group():

        def trial_in(meeting: Meeting, world: World | None = None) -> Trial:
            return Trial(function, meeting, seconds, facts[0]["seed"], world)

        verdict, state = _tried(exercise, trial_in(meeting))
        if verdict.passed:
            again, state = _tried_again(exercise, meeting, trial_in)
            verdict = replace(verdict, criteria=verdict.criteria | again)
        if state.get("ranks_missing"):
            return verdict.with_note("Press Stop, then run the cells again.")
        destroyed = any(exchange_with_group_count(meeting, not dist.is_initialized()))
        if state.get("spoiled") and not destroyed:
            verdict = verdict.with_note(renew(seconds + GRACE))
    return verdict.with_note(make_anew(meeting, backend)) if destroyed else verdict


def _tried(exercise: Exercise, trial: Trial) -> tuple[Verdict, dict[str, bool]]:
    groups = all_groups()
    try:
        with contextlib.suppress(AnswerFailed), prepared():
            exercise.examine(trial)
    except Exception as error:  # not to be raised here: the other ranks would wait for this one
        trial.stumble(error)
    verdict = trial.verdict()
    if not trial.spoiled and dist.is_initialized():
        destroy_all_but(groups)
    return verdict, {"spoiled": trial.spoiled, "ranks_missing": trial.ranks_missing}


def _tried_again(
    exercise: Exercise, meeting: Meeting, trial_in: Callable[[Meeting, World], Trial]
) -> tuple[dict[str, str], dict[str, bool]]:
    """Try an answer in the other worlds; all ranks hear which criteria hold in the first where some do not."""
    worlds = other_worlds(meeting.size, exercise.takes_group)
    told: list[dict[str, Any] | None] = [None] * len(worlds)
    try:
        with another_world(worlds, exercise.takes_group, meeting) as world:
            if world is not None:
                own = worlds.index(world.seats)
                told[own] = {"criteria": {"runs": "the check itself failed"}, "state": {}}  # unless it comes to its end
                verdict, state = _tried(exercise, trial_in(meeting.among(world.seats), world))
                told[own] = {"criteria": verdict.criteria, "state": state}
    finally:
        heard = [meeting.hear(fact, LONGEST) for fact in told]
    everything = {name: "" for each in heard for name in each["criteria"]}
    criteria = next((each["criteria"] for each in heard if any(each["criteria"].values())), everything)
    return criteria, {name: any(each["state"].get(name) for each in heard) for name in ("spoiled", "ranks_missing")}
