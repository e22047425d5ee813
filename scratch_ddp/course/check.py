"""`check`: run a learner's function on all ranks beside the reference, and say which criteria hold.

Both get the same inputs, in the arena. What an answer returns, what its arguments hold afterwards, what it sends and
what it holds in memory is compared with the reference. So an exercise states neither expected values nor budgets.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from scratch_ddp.cells.rank import interruptible_group
from scratch_ddp.course.arena import GRACE, Arena, At, RanksMissing
from scratch_ddp.course.compare import difference, digest, ranks, times
from scratch_ddp.course.exercise import RESULT, Exercise, answer, borrowed, exercise_of
from scratch_ddp.course.run import Ran, run
from scratch_ddp.instruments.traffic import Totals

INSTEAD = Path("solutions.md")  # in the notebook's folder, which is a kernel's current one
SECONDS = 3.5  # that one call of an answer may take; after 4 a rank cell shows ranks that wait apart from others
NOT_WRITTEN = "not written yet"
LONGEST = 300.0  # seconds for all calls in a group


def check(function: Callable, seconds: float = SECONDS) -> None:
    """Print which criteria a learner's function meets: the same lines on every rank. Call it on all ranks.

    Prints `not written yet` while it is the stub on every rank. Each call of the function may take `seconds`: then it
    is ended, if it computes or waits for other ranks. Afterwards the process group works, whatever it did.
    """
    print("\n".join(lines(examine(function, seconds))))


def lines(criteria: dict[str, str]) -> list[str]:
    """`✓ value   ✓ agreement`, then a line for each criterion that does not hold."""
    if NOT_WRITTEN in criteria.values():
        return [NOT_WRITTEN]
    held = "   ".join(f"✓ {name}" for name, words in criteria.items() if not words)
    return [held] * bool(held) + [f"✗ {name:<7} {words}" for name, words in criteria.items() if words]


def solution(function: Callable) -> None:
    """Print the reference of an exercise, given the learner's function.

    Where a teacher has put a file `solutions.md` beside the notebook, print that instead.
    """
    exercise = exercise_of(function)
    text = INSTEAD.read_text(encoding="utf-8") if INSTEAD.exists() else answer(exercise.reference)
    print(text.rstrip("\n"))


def examine(function: Callable, seconds: float = SECONDS) -> dict[str, str]:
    """As `check`, but print nothing: {criterion: complaint}, "" for those that hold. The same on every rank.

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
            f"check({exercise.name}) runs on every rank: {ranks(error.args[0]).lower()} did not come within "
            f"{GRACE:g} s. Run the cell without %%rank. If it failed there, mend that first."
        ) from None
    names, takers = zip(*arena.exchange("who", (exercise.name, borrowed(function)), GRACE), strict=True)
    if len(set(names)) > 1:
        return {"runs": f"The ranks check different functions: {', '.join(names)}."}
    if any(takers):
        return {"own": f"The answer calls {max(takers)}: write it yourself."}
    try:
        with torch.random.fork_rng(devices=[]), arena:
            criteria = try_cases(exercise, function, arena, seconds, At(arena.rank, arena.n, tuple(range(arena.n))))
            if exercise.takes_group and arena.n > 2 and not any(criteria.values()):
                criteria |= _tried_in_group(exercise, function, arena, seconds)
            arena.count_groups_alike()
    except RanksMissing as error:
        words = f"{ranks(error.args[0])} did not come back, though told to stop after {seconds:g} s. Press Stop."
        return {"runs": words}
    return criteria


def _tried_in_group(exercise: Exercise, function: Callable, arena: Arena, seconds: float) -> dict[str, str]:
    """Try once more in a group of ranks 1 to n-1, while rank 0 waits; the criteria that fail there."""
    members, criteria = tuple(range(1, arena.n)), {}
    group = dist.new_group(list(members), backend=interruptible_group.BACKEND)
    if arena.rank in members:
        criteria = try_cases(exercise, function, arena, seconds, At(arena.rank - 1, arena.n - 1, members, group))
    told = arena.exchange("in a group", criteria, LONGEST)
    return {name: words for name, words in told[1].items() if words}


def try_cases(exercise: Exercise, function: Callable, arena: Arena, seconds: float, at: At) -> dict[str, str]:
    """The criteria of one pass over all cases, the same on each of its ranks. It ends with a call that failed."""
    where = f", in a group of {ranks(at.members).lower()}, there numbers 0 to {at.n - 1}" if at.group else ""
    criteria: dict[str, str] = {}
    tried = (exercise.reference, exercise.inputs(at)), (function, exercise.inputs(at))
    for number in itertools.count():
        ran = []
        for each, inputs in tried:
            torch.default_generator.manual_seed(number)
            case, args = next(inputs, ("", None))
            if args is None:
                return criteria
            ran.append(run(each, exercise, args, arena, f"{number}.{len(ran)}{where}", seconds, at))
        _compare(*ran, exercise)
        told = arena.exchange(f"case {number}{where}", ran, seconds + GRACE, at.members)
        right, mine = (dict(zip(at.members, each, strict=True)) for each in zip(*told, strict=True))
        case = _Case(case + where, right, mine)
        if failure := case.failure():
            return {name: words for name, words in criteria.items() if words} | failure
        for name, words in case.criteria(exercise.cost).items():
            criteria[name] = criteria.get(name) or words


def _compare(right: Ran, mine: Ran, exercise: Exercise) -> None:
    """Put into both what was found, and let go of what was seen."""
    seen = {what: value for _, what, value in mine.seen}
    for criterion, what, value in right.seen if mine.how == "returned" else ():
        if what == RESULT and not exercise.returns:
            continue
        text = difference(what, seen[what], value, exercise.close) if what in seen else f"{what} is gone"
        mine.found[criterion] = mine.found.get(criterion) or text
        if criterion == "value":
            right.digests[what], mine.digests[what] = digest(value), digest(seen.get(what))
    right.seen = mine.seen = []


@dataclass
class _Case:
    """A case that has been tried: its name, and how both calls ended on each rank."""

    name: str
    right: dict[int, Ran]
    mine: dict[int, Ran]

    def failure(self) -> dict[str, str]:
        """Why nothing further can be tried: a criterion and its complaint; empty if both calls have ended well."""
        if any(ran.how != "returned" for ran in self.right.values()):
            return {"runs": f"{self.name}: the check itself failed. {_endings(self.right)}"}
        if stubs := [rank for rank, ran in self.mine.items() if ran.how == "unwritten"]:
            some = f"The stub still stands on {ranks(stubs).lower()}: run your cell on every rank."
            return {"written": some if len(stubs) < len(self.mine) else NOT_WRITTEN}
        if wrong := {rank: ran.words for rank, ran in self.mine.items() if ran.how == "wrong"}:
            return {self.mine[min(wrong)].criterion: self._complaint(wrong)}
        if raised := [rank for rank, ran in self.mine.items() if ran.how == "raised"]:
            too = f" {ranks(raised[1:])} too." if raised[1:] else ""
            return {"runs": f"{self.name}: Rank {raised[0]} {self.mine[raised[0]].words}.{too}"}
        behind = left_over({rank: ran.begun for rank, ran in self.mine.items()})
        if any(ran.how == "waits" for ran in self.mine.values()):
            return {"runs": f"{self.name}: {_endings(self.mine)} {behind}".rstrip()}
        if behind:
            return {"group": f"{self.name}: {behind} A later cell would take what is left for its own."}
        late = {rank: ran.late for rank, ran in self.mine.items() if ran.late}
        return {"waits": self._complaint(late)} if late else {}

    def criteria(self, cost: bool) -> dict[str, str]:
        """All criteria, of a case that has not failed."""
        criteria = {}
        for name in dict.fromkeys(name for ran in self.mine.values() for name in ran.found):
            said = {rank: ran.found[name] for rank, ran in self.mine.items() if ran.found.get(name)}
            criteria[name] = self._complaint(said) if said else ""
        shared = [what for what in self.right[min(self.right)].digests if _agreed(self.right, what)]
        if _sends(self.right) and len(self.mine) > 1 and shared:
            apart = next((what for what in shared if not _agreed(self.mine, what)), "")
            criteria["agreement"] = f"{self.name}: {apart} has not the same bits on all ranks." if apart else ""
        if cost and (_sends(self.right) or _sends(self.mine)):
            over = self._exceeded()
            criteria["cost"] = f"{len(self.mine)} ranks, {self.name}: {over}." if over else ""
        return criteria

    def _exceeded(self) -> str:
        """What is more than the reference needs, as a phrase; "" if nothing is."""
        for rank, ran in self.mine.items():
            calls, budget = _collectives(ran), sum(_collectives(self.right[rank]).values())
            if sum(calls.values()) > budget:
                names = " and ".join(f"{name} {times(number)}" for name, number in calls.items())
                return f"rank {rank} calls {names}, budget {budget}"
        used = _figures(self.mine)
        rounding = sum(_collectives(self.right[min(self.right)]).values())  # of bytes on a ring, in each call
        for name, limit in _figures(self.right).items():
            if used.get(name, 0) > limit + (rounding if name.startswith("bytes") else 0):
                return f"{used[name]:,} {name}, budget {limit:,}"
        return ""

    def _complaint(self, said: dict[int, str]) -> str:
        """`Rank 0, two rows: the result is 3, should be 4. Ranks 1 and 2 too.` said: by rank, of those that complain.

        Of a function that sends nothing, which says the same everywhere, no rank is named.
        """
        first, *others = sorted(said)
        if len(set(said.values())) == 1 and len(said) == len(self.mine) and not _sends(self.right):
            return f"{self.name}: {said[first]}."
        return f"Rank {first}, {self.name}: {said[first]}.{f' {ranks(others)} too.' if others else ''}"


def left_over(begun: dict[int, dict[str, tuple[list[int], int]]]) -> str:
    """What is still in the process group after a call, in a sentence; "" if nothing is. begun: of Watch, by rank."""
    for rank, other in itertools.permutations(begun, 2):
        for key, (members, number) in begun[rank].items():
            theirs = begun[other].get(key, ((), 0))[1]
            if other not in members or theirs >= number:
                continue
            if ">" not in key:
                return f"Rank {rank} called {number} collective{'s' * (number > 1)}, rank {other} {theirs or 'none'}."
            if key.endswith(f" {rank}>{other}"):
                arrived = times(theirs) if theirs else "nothing"
                return f"Rank {rank} sent to rank {other} {times(number)}, rank {other} received {arrived}."
            return f"Rank {rank} waits for a message that rank {other} never sent."
    return ""


def _endings(runs: dict[int, Ran]) -> str:
    """`Rank 2 did not come back … Ranks 0 and 1 had returned.`"""
    members: dict[str, list[int]] = {}
    for rank, ran in runs.items():
        members.setdefault(ran.words, []).append(rank)
    return " ".join(f"{ranks(who)} {words}." for words, who in members.items())


def _agreed(runs: dict[int, Ran], what: str) -> bool:
    """Whether all ranks have seen it with the same bits."""
    return len({ran.digests.get(what) for ran in runs.values()}) == 1


def _sends(runs: dict[int, Ran]) -> bool:
    return any(ran.report.calls for ran in runs.values())


def _collectives(ran: Ran) -> dict[str, int]:
    return {name: number for name, number in ran.report.calls.items() if name not in ("send", "recv")}


def _figures(runs: dict[int, Ran]) -> dict[str, int]:
    """What a call costs on all ranks together; the last two only if there are messages."""
    totals = Totals([ran.report for ran in runs.values()])
    figures = {"messages": totals.messages, "bytes from one rank": totals.max_wire_bytes}
    if totals.messages:
        events = (event for ran in runs.values() for event in ran.report.events)
        largest = max(call.payload for _, call in events if call.name == "send")
        figures |= {"rounds one after another": totals.depth, "bytes in one message": largest}
    return figures
