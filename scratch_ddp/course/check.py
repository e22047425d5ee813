"""`check`: run a learner's function on all ranks beside the reference, and say which criteria hold.

Both get the same inputs, in the arena. What an answer returns, what its arguments hold afterwards, what it sends and
what it holds in memory is compared with the reference. So an exercise states neither expected values nor budgets.
"""

import inspect
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from scratch_ddp.cells.rank import interruptible_group
from scratch_ddp.cells.words import name_ranks
from scratch_ddp.course.arena import GRACE, Arena, RanksMissing
from scratch_ddp.course.compare import difference, digest, times
from scratch_ddp.course.exercise import RESULT, At, Exercise, exercise_of
from scratch_ddp.course.run import HANGS, NOT_WRITTEN, Ran, TimeLimit, run
from scratch_ddp.instruments.traffic import Totals
from scratch_ddp.instruments.traffic.counts import channel

INSTEAD = Path("solutions.md")  # in the notebook's folder, which is a kernel's current one
SECONDS = 3.5  # that one call of an answer may take; after 4 a rank cell shows ranks that wait apart from others
CALLS = "collective calls of one rank"
LONGEST = 300.0  # seconds for all calls in a group


def check(function: Callable, seconds: float = SECONDS) -> None:
    """Print which criteria a learner's function meets: the same lines on every rank. Call it on all ranks.

    Prints `not written yet` while it is the stub on every rank. Each call of the function may take `seconds`: then it
    is ended, if it computes or waits for other ranks. Afterwards the process group works, whatever it did.
    """
    criteria = examine(function, seconds)
    held = "   ".join(f"✓ {name}" for name, words in criteria.items() if not words)
    lines = [held] * bool(held) + [f"✗ {name:<7} {words}" for name, words in criteria.items() if words]
    print(NOT_WRITTEN if NOT_WRITTEN in criteria.values() else "\n".join(lines))


def solution(function: Callable) -> None:
    """Print the reference of an exercise, given the learner's function.

    Where a teacher has put a file `solutions.md` beside the notebook, print that instead.
    """
    exercise = exercise_of(function)
    print(INSTEAD.read_text(encoding="utf-8").rstrip("\n") if INSTEAD.exists() else exercise.source())


def examine(function: Callable, seconds: float = SECONDS) -> dict[str, str]:
    """As `check`, but print nothing: {criterion: complaint}, "" for those that hold. The same on every rank.

    Raises ValueError if the function is not an exercise, RuntimeError if there are fewer than two ranks or if some
    ranks do not come.
    """
    exercise = exercise_of(function)
    if not dist.is_initialized() or dist.get_world_size() < 2:
        raise RuntimeError("an exercise is checked on two or more ranks: start them with %dist_init -n 4")
    if function.__module__.startswith("scratch_ddp."):  # a later cell has imported it
        return {"own": f"This is {function.__module__}.{exercise.name}, not yours: run your own cell again."}
    arena = Arena()
    try:
        with torch.random.fork_rng(devices=[]), arena, TimeLimit(arena, seconds) as limit:
            criteria = try_cases(exercise, function, arena, limit, arena.everyone)
            takes_group = "group" in inspect.signature(exercise.reference).parameters
            if takes_group and arena.n > 2 and not any(criteria.values()):
                criteria |= _tried_in_group(exercise, function, arena, limit)
            return criteria
    except RanksMissing as error:
        who = name_ranks(error.args[0]).capitalize()
        return {"runs": f"{who} did not come back, though told to stop after {seconds:g} s. Press Stop."}


def _tried_in_group(exercise: Exercise, function: Callable, arena: Arena, limit: TimeLimit) -> dict[str, str]:
    """Try once more in a group of ranks 1 to n-1, while rank 0 waits; the criteria that fail there."""
    members, criteria = arena.everyone.members[1:], {}
    group = dist.new_group(list(members), backend=interruptible_group.BACKEND)
    if arena.rank in members:
        criteria = try_cases(exercise, function, arena, limit, At(arena.rank - 1, arena.n - 1, members, group))
    criteria, arena.spoilt = arena.exchange("in a group", (criteria, arena.spoilt), LONGEST)[1]
    return {name: words for name, words in criteria.items() if words}


def try_cases(exercise: Exercise, function: Callable, arena: Arena, limit: TimeLimit, at: At) -> dict[str, str]:
    """The criteria of one pass over all cases, the same on each of its ranks. It ends with a call that failed."""
    where = f", in a group of {name_ranks(at.members)}, there numbers 0 to {at.n - 1}" if at.group else ""
    criteria: dict[str, str] = {}
    tried = (exercise.reference, exercise.cases(at)), (function, exercise.cases(at))
    for number in itertools.count():
        ran = []
        for each, inputs in tried:
            torch.default_generator.manual_seed(number)
            name, args = next(inputs, ("", None))
            if args is None:
                return criteria
            ran.append(run(each, exercise, args, arena, f"{number}.{len(ran)}{where}", limit, at))
        _compare(*ran, exercise)
        told = arena.exchange(f"case {number}{where}", ran, limit.seconds + GRACE, at.members)
        case = _Case(name + where, *(dict(zip(at.members, each, strict=True)) for each in zip(*told, strict=True)))
        if failure := case.failure():
            arena.spoilt = True
            return {name: words for name, words in criteria.items() if words} | failure
        for name, words in case.criteria(exercise.cost).items():
            criteria[name] = criteria.get(name) or words


def _compare(right: Ran, mine: Ran, exercise: Exercise) -> None:
    """Put into both what was found, and let go of what was seen."""
    seen = {what: value for _, what, value in mine.seen}
    for criterion, what, value in right.seen if not mine.failed else ():
        unasked = what == RESULT and value is None and not exercise.returns
        if unasked or (what not in seen and any(mine.found.values())):  # gone for a reason that is said already
            continue
        said = f"{what} was changed: it" if criterion == "untouched" else what
        text = difference(said, seen[what], value, exercise.close) if what in seen else f"{what} is gone"
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
        if any(ran.failed for ran in self.right.values()):
            return {"runs": f"{self.name}: the check itself failed. {_endings(self.right)}"}
        failed = {ran.failed for ran in self.mine.values()}
        behind = left_over(self.mine)
        if "written" in failed:
            stubs = name_ranks(rank for rank, ran in self.mine.items() if ran.failed == "written")
            some = f"The stub still stands on {stubs}: run your cell on every rank."
            return {"written": some if len(failed) > 1 else NOT_WRITTEN}
        for criterion in sorted(failed - {"", HANGS, "waits"}):
            return {criterion: self._complaint(criterion)}
        if HANGS in failed:
            return {"runs": f"{self.name}: {_endings(self.mine)} {behind}".rstrip()}
        if behind:
            return {"group": f"{self.name}: {behind} A later cell would take what is left for its own."}
        return {"waits": self._complaint("waits")} if "waits" in failed else {}

    def criteria(self, cost: bool) -> dict[str, str]:
        """All criteria, of a case that has not failed."""
        names = dict.fromkeys(name for ran in self.mine.values() for name in ran.found)
        criteria = {name: self._complaint(name) for name in names}
        sends = _sends(self.right)
        shared = [what for what in self.right[min(self.right)].digests if _agreed(self.right, what)]
        if sends and len(self.mine) > 1 and shared:
            apart = next((what for what in shared if not _agreed(self.mine, what)), "")
            criteria["agreement"] = f"{self.name}: {apart} has not the same bits on all ranks." if apart else ""
        if cost and (sends or _sends(self.mine)):
            used, budget = _figures(self.mine), _figures(self.right)
            rounding = {name: budget[CALLS] * name.startswith("bytes") for name in budget}  # on a ring, in each call
            over = [name for name, limit in budget.items() if used.get(name, 0) > limit + rounding[name]]
            words = [f"{used[name]:,} {name}, budget {budget[name]:,}" for name in over[:1]]
            criteria["cost"] = f"{len(self.mine)} ranks, {self.name}: {words[0]}." if words else ""
        return criteria

    def _complaint(self, criterion: str) -> str:
        """`Rank 0, two rows: the result is 3, should be 4. Ranks 1–2 too.`; "" if no rank complains.

        Of a function that sends nothing, which says the same everywhere, no rank is named.
        """
        said = {rank: ran.found[criterion] for rank, ran in self.mine.items() if ran.found.get(criterion)}
        if not said:
            return ""
        first, *others = sorted(said)
        if len(set(said.values())) == 1 and len(said) == len(self.mine) and not _sends(self.right):
            return f"{self.name}: {said[first]}."
        too = f" {name_ranks(others).capitalize()} too." if others else ""
        return f"Rank {first}, {self.name}: {said[first]}.{too}"


def left_over(runs: dict[int, Ran]) -> str:
    """What is still in the process group after a call, in a sentence; "" if nothing is."""
    calls = {rank: [call for event, call in ran.report.events if event == "start"] for rank, ran in runs.items()}
    started = {rank: Counter(map(channel, each)) for rank, each in calls.items()}
    for rank, other in itertools.permutations(started, 2):
        for (kind, *ends), number in started[rank].items():
            theirs = started[other][kind, *ends]
            if other not in (ends[0] if kind == "collective" else ends[:2]) or theirs >= number:
                continue
            if kind == "collective":
                return f"Rank {rank} called {number} collective{'s' * (number > 1)}, rank {other} {theirs or 'none'}."
            if ends[0] == rank:
                arrived = times(theirs) if theirs else "nothing"
                return f"Rank {rank} sent to rank {other} {times(number)}, rank {other} received {arrived}."
            return f"Rank {rank} waits for a message that rank {other} never sent."
    return ""


def _endings(runs: dict[int, Ran]) -> str:
    """`Rank 2 did not come back … Ranks 0–1 had returned.`"""
    members: dict[str, list[int]] = {}
    for rank, ran in runs.items():
        words = "had returned" if ran.failed in ("", "waits") else ran.found[ran.failed]
        members.setdefault(words, []).append(rank)
    return " ".join(f"{name_ranks(who).capitalize()} {words}." for words, who in members.items())


def _agreed(runs: dict[int, Ran], what: str) -> bool:
    """Whether all ranks have seen it with the same bits."""
    return len({ran.digests.get(what) for ran in runs.values()}) == 1


def _sends(runs: dict[int, Ran]) -> bool:
    return any(ran.report.calls for ran in runs.values())


def _figures(runs: dict[int, Ran]) -> dict[str, int]:
    """What a call costs on all ranks together; the last two only if there are messages."""
    totals = Totals([ran.report for ran in runs.values()])
    calls = [sum(n for name, n in each.calls.items() if name not in ("send", "recv")) for each in totals.per_rank]
    figures = {CALLS: max(calls), "messages": totals.messages, "bytes from one rank": totals.max_wire_bytes}
    if totals.messages:
        events = (event for each in totals.per_rank for event in each.events)
        largest = max(call.payload for _, call in events if call.name == "send")
        figures |= {"rounds one after another": totals.depth, "bytes in one message": largest}
    return figures
