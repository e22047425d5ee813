"""`check`: run a learner's function on all ranks beside the reference, and say which criteria hold.

Both get the same inputs, in the arena. What an answer returns, what its arguments hold afterwards, what it sends and
what it holds in memory is compared with the reference. So an exercise states neither expected values nor budgets.
"""

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.distributed as dist

from scratch_ddp.course.arena import GRACE, Arena, At, RanksMissing
from scratch_ddp.course.compare import difference, digest, ranks, times
from scratch_ddp.course.exercise import Exercise, answer, borrows, exercise_of, is_stub
from scratch_ddp.course.run import Ran, left_over, never_waited_for, run
from scratch_ddp.instruments.traffic import Totals

INSTEAD = Path("solutions.md")  # in the notebook's folder, which is a kernel's current one
SECONDS = 5.0  # that one call of an answer may take
LONGEST = 300.0  # seconds for all calls in a group
NOT_WRITTEN = "not written yet"


@dataclass(frozen=True)
class Verdict:
    """The result of an examination, the same on every rank.

    criteria: name -> complaint, "" where the criterion holds; no criteria: the answer is not written yet.
    """

    criteria: dict[str, str] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return bool(self.criteria) and not any(self.criteria.values())

    @property
    def lines(self) -> list[str]:
        """`✓ value   ✓ agreement`, then a line for each criterion that does not hold."""
        if not self.criteria:
            return [NOT_WRITTEN]
        held = "   ".join(f"✓ {name}" for name, complaint in self.criteria.items() if not complaint)
        return [held] * bool(held) + [f"✗ {name:<7} {words}" for name, words in self.criteria.items() if words]


def check(function: Callable, seconds: float = SECONDS) -> None:
    """Print which criteria a learner's function meets: the same lines on every rank. Call it on all ranks.

    Prints `not written yet` while it is the stub on every rank. Each call of the function may take `seconds`: then it
    is ended, if it computes or waits for other ranks. Afterwards the process group works, whatever it did.
    """
    print("\n".join(examine(function, seconds).lines))


def solution(function: Callable) -> None:
    """Print the reference of an exercise, given the learner's function.

    Where a teacher has put a file `solutions.md` beside the notebook, print that instead.
    """
    exercise = exercise_of(function)
    text = INSTEAD.read_text(encoding="utf-8") if INSTEAD.exists() else answer(exercise.reference)
    print(text.rstrip("\n"))


def examine(function: Callable, seconds: float = SECONDS) -> Verdict:
    """As `check`, but return the verdict, the same on every rank, and print nothing.

    Raises TypeError or ValueError if the function is not an exercise, RuntimeError if there are fewer than two ranks
    or if some ranks do not come.
    """
    exercise = exercise_of(function)
    if not dist.is_initialized() or dist.get_world_size() < 2:
        raise RuntimeError("an exercise is checked on two or more ranks: start them with %dist_init -n 4")
    try:
        arena = Arena()
    except RanksMissing as error:
        raise RuntimeError(
            f"check({exercise.name}) runs on every rank: {ranks(error.missing).lower()} did not come within "
            f"{GRACE:g} s. Run the cell without %%rank. If it failed there, mend that first."
        ) from None
    stubs = is_stub(function, exercise.reference)
    facts = arena.exchange("who", (exercise.name, stubs, borrows(function, exercise.name)), GRACE)
    unwritten = [rank for rank, (_, stub, _) in enumerate(facts) if stub]
    if len({name for name, _, _ in facts}) > 1:
        names = ", ".join(f"rank {rank} {name}" for rank, (name, _, _) in enumerate(facts))
        return Verdict({"runs": f"The ranks check different functions: {names}."})
    if len(unwritten) == arena.n:
        return Verdict()
    if unwritten:
        still = "has" if len(unwritten) == 1 else "have"
        return Verdict({"written": f"{ranks(unwritten)} still {still} the stub: run your cell on every rank."})
    if borrowed := next((fact[2] for fact in facts if fact[2]), ""):
        return Verdict({"own": f"The answer calls {borrowed}: write it yourself."})
    try:
        with torch.random.fork_rng(devices=[]), arena:
            criteria = try_cases(
                exercise, function, arena, seconds, At(arena.rank, arena.n, members=tuple(range(arena.n)))
            )
            if exercise.takes_group and not any(criteria.values()):
                criteria |= _tried_in_group(exercise, function, arena, seconds)
            arena.count_groups_alike(GRACE)
    except RanksMissing as error:
        words = f"{ranks(error.missing)} did not come back, though told to stop after {seconds:g} s. Press Stop."
        return Verdict({"runs": words})
    return Verdict(criteria)


def _tried_in_group(exercise: Exercise, function: Callable, arena: Arena, seconds: float) -> dict[str, str]:
    """Try once more in a group of ranks 1 to n-1, while rank 0 waits; the criteria that fail there."""
    members = tuple(range(1, arena.n))
    group = arena.part(members)
    criteria = None
    if arena.rank in members:
        at = At(arena.rank - 1, arena.n - 1, group, members)
        criteria = try_cases(exercise, function, arena, seconds, at)
    told = arena.exchange("in a group", criteria, LONGEST)
    return {name: words for name, words in told[1].items() if words}


def try_cases(exercise: Exercise, function: Callable, arena: Arena, seconds: float, at: At) -> dict[str, str]:
    """The criteria of one pass over all cases, the same on each of its ranks. It ends with a call that failed."""
    where = f", in a group of {ranks(at.members).lower()} (numbered from 0)" if at.group else ""
    criteria: dict[str, str] = {}
    tried = {"reference": (exercise.reference, exercise.inputs(at)), "answer": (function, exercise.inputs(at))}
    for number in itertools.count():
        ran = {}
        for name, (each, inputs) in tried.items():
            torch.manual_seed(number)
            case, args = next(inputs, ("", None))
            if args is None:
                return criteria
            room = exercise.room(*args) if exercise.room else 0
            ran[name] = run(each, exercise, args, arena, f"{name} {number}{where}", seconds, at)
        fact = _compared(exercise, ran["reference"], ran["answer"], room)
        facts = arena.exchange(f"case {number}{where}", fact, seconds + GRACE, at.members)
        by_rank = dict(zip(at.members, facts, strict=True))
        if failure := _failure(by_rank, case + where, seconds):
            return {name: words for name, words in criteria.items() if words} | failure
        for name, words in _merged(by_rank, case + where, exercise.cost).items():
            criteria[name] = criteria.get(name) or words


@dataclass
class _Fact:
    """What a rank tells the others about a case.

    found: criterion -> this rank's first complaint, "" if there is none. digests: what -> of the reference's value, and
    of the answer's. values and events are not told.
    """

    right: Ran
    mine: Ran
    found: dict[str, str]
    digests: dict[str, tuple[str, str]]


def _compared(exercise: Exercise, right: Ran, mine: Ran, room: int) -> _Fact:
    found: dict[str, str] = {}
    digests: dict[str, tuple[str, str]] = {}
    theirs = {what: value for _, what, value in mine.seen}
    for criterion, what, value in right.seen if mine.how == "returned" else ():
        text = difference(what, theirs[what], value, exercise.close) if what in theirs else f"{what} is gone"
        found[criterion] = found.get(criterion) or text
        if criterion == "value":
            digests[what] = digest(value), digest(theirs.get(what))
    if late := never_waited_for(mine.report):
        found["waits"] = late
    if exercise.room:
        held = f"holds {mine.held:,} elements beside its arguments, budget {room:,}"
        found["memory"] = held if mine.held > room else ""
    return _Fact(replace(right, seen=[]), replace(mine, seen=[]), found, digests)


def _failure(facts: dict[int, _Fact], case: str, seconds: float) -> dict[str, str]:
    """Why nothing further can be tried: a criterion and its complaint; empty if the calls have come to their end."""
    mine = {rank: fact.mine for rank, fact in facts.items()}
    if any(fact.right.how != "returned" for fact in facts.values()):
        own = {rank: _ending(fact.right, seconds) for rank, fact in facts.items()}
        return {"runs": f"{case}: the check itself failed. {_by_text(own)}"}
    wrong = {rank: ran for rank, ran in mine.items() if ran.how == "wrong"}
    if wrong:
        first = min(wrong)
        said = {rank: ran.words for rank, ran in wrong.items() if ran.criterion == wrong[first].criterion}
        return {wrong[first].criterion: _complaint(said, case, facts)}
    raised = [rank for rank, ran in mine.items() if ran.how == "raised"]
    if raised:
        too = f" {ranks(raised[1:])} too." if raised[1:] else ""
        return {"runs": f"{case}: {ranks(raised[:1])} {_ending(mine[raised[0]], seconds)}.{too}"}
    behind = left_over({rank: ran.report for rank, ran in mine.items()})
    if any(ran.how == "waits" for ran in mine.values()):
        endings = _by_text({rank: _ending(ran, seconds) for rank, ran in mine.items()})
        return {"runs": f"{case}: {endings} {behind}".rstrip()}
    if behind:
        return {"group": f"{case}: {behind} A later cell would take what is left for its own."}
    late = {rank: fact.found["waits"] for rank, fact in facts.items() if "waits" in fact.found}
    return {"waits": _complaint(late, case, facts)} if late else {}


def _ending(ran: Ran, seconds: float) -> str:
    if ran.how == "raised":
        return f"raised {ran.words}{f' ({ran.place})' if ran.place else ''}"
    if ran.how == "waits":
        return f"did not come back: after {seconds:g} s still {f'in {ran.place}' if ran.place else 'running'}"
    return "had returned" if ran.how == "returned" else ran.words


def _by_text(texts: dict[int, str]) -> str:
    """`Rank 2 waits in line 3. Ranks 0 and 1 had returned.`"""
    members: dict[str, list[int]] = {}
    for rank, text in texts.items():
        members.setdefault(text, []).append(rank)
    return " ".join(f"{ranks(who)} {text}." for text, who in members.items())


def _merged(facts: dict[int, _Fact], case: str, cost: bool) -> dict[str, str]:
    """All criteria of a case in which every rank has returned."""
    criteria = {}
    for name in dict.fromkeys(name for fact in facts.values() for name in fact.found):
        said = {rank: fact.found[name] for rank, fact in facts.items() if fact.found.get(name)}
        criteria[name] = _complaint(said, case, facts) if said else ""
    budget, used = (Totals.of([getattr(fact, which).report for fact in facts.values()]) for which in ("right", "mine"))
    if _sends(facts):
        shared = [what for what in facts[min(facts)].digests if len(_bits(facts, what, 0)) == 1]
        if shared and len(facts) > 1:
            other = next((what for what in shared if len(_bits(facts, what, 1)) > 1), "")
            criteria["agreement"] = f"{case}: {other} has not the same bits on all ranks." if other else ""
    if cost and (_sends(facts) or any(counts.calls for counts in used.per_rank)):
        largest = [max(getattr(fact, which).largest for fact in facts.values()) for which in ("right", "mine")]
        over = _exceeded(used, budget, facts, *largest)
        criteria["cost"] = f"{len(facts)} ranks, {case}: {over}." if over else ""
    return criteria


def _sends(facts: dict[int, _Fact]) -> bool:
    """Whether the reference does."""
    return any(fact.right.report[0].calls for fact in facts.values())


def _bits(facts: dict[int, _Fact], what: str, which: int) -> set[str]:
    """Of the reference (0) or the answer (1), on all ranks."""
    return {fact.digests[what][which] if what in fact.digests else "" for fact in facts.values()}


def _exceeded(used: Totals, budget: Totals, members: Iterable[int], most: int, largest: int) -> str:
    """What is more than the reference needs, as a phrase; "" if nothing is. most, largest: bytes of one message."""
    for rank, mine, right in zip(members, used.per_rank, budget.per_rank, strict=True):
        calls, allowed = ({k: n for k, n in each.calls.items() if k not in ("send", "recv")} for each in (mine, right))
        if sum(calls.values()) > sum(allowed.values()):
            names = " and ".join(f"{name} {times(number)}" for name, number in calls.items())
            return f"rank {rank} calls {names}, budget {sum(allowed.values())}"
    rounding = sum(sum(counts.calls.values()) for counts in budget.per_rank)  # bytes on a ring are rounded by call
    figures = {
        "messages": (used.messages, budget.messages),
        "bytes from one rank": (used.max_wire_bytes, budget.max_wire_bytes, rounding),
        "rounds one after another": (used.depth, budget.depth) if budget.messages else (0, 0),
        "bytes in one message": (largest, most) if budget.messages else (0, 0),
    }
    for name, (number, limit, *slack) in figures.items():
        if number > limit + sum(slack):
            return f"{number:,} {name}, budget {limit:,}"
    return ""


def _complaint(said: dict[int, str], case: str, facts: dict[int, _Fact]) -> str:
    """`Rank 0, two rows: the result is 3, should be 4. Ranks 1 and 2 too.` said: by rank, of those that complain.

    Of a function that sends nothing, which says the same everywhere, no rank is named.
    """
    first, *others = sorted(said)
    if len(set(said.values())) == 1 and len(said) == len(facts) and not _sends(facts):
        return f"{case}: {said[first]}."
    return f"Rank {first}, {case}: {said[first]}.{f' {ranks(others)} too.' if others else ''}"
