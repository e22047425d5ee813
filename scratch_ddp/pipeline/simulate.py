"""What a schedule does, found without running it: when each action runs, who waits for what, what a rank holds."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from scratch_ddp.pipeline.schedules import Action, Row, Schedule

Spans = Sequence[Sequence[tuple[Action, float, float]]]  # for each rank (action, start, end), in order
UNITS: Mapping[str, float] = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}  # what actions cost, in forwards


class Message(NamedTuple):
    """What one stage hands to the next. "x": its output for a micro-batch; "g": the gradient of its input."""

    what: str
    stage: int
    micro: int

    def __str__(self) -> str:
        what = "output" if self.what == "x" else "gradient"
        return f"the {what} of stage {self.stage} for micro-batch {self.micro}"


def needs(action: Action, last: int) -> list[Message]:
    """What must be there before the action can run; what comes from another stage is at the end. `last`: the stage."""
    kind, stage, micro = action
    if kind == "F":
        return [Message("x", stage - 1, micro)] if stage > 0 else []
    if kind == "W":
        return [Message("g", stage, micro)]
    return [Message("x", stage, micro), *([Message("g", stage + 1, micro)] if stage < last else [])]


def gives(action: Action) -> Message | None:
    """What is there once the action has run: other stages wait for it."""
    what = {"F": "x", "B": "g", "I": "g"}.get(action.kind)
    return Message(what, action.stage, action.micro) if what else None


def homes(schedule: Schedule) -> dict[int, int]:
    """The rank of each stage."""
    return {action.stage: rank for rank, row in enumerate(schedule) for action in row}


def simulate(
    schedule: Schedule, cost: Mapping[str, float] | Callable[[Action], float] = UNITS, hop: float = 0.0
) -> list[list[tuple[Action, float, float]]]:
    """Return for each rank (action, start, end), if every action starts as soon as it can.

    cost: how long an action takes, by kind or as a function. hop: how long a message takes from rank to rank. Raises
    ValueError if the schedule deadlocks, and says which rank waits for what.
    """
    price = cost if callable(cost) else lambda action: cost[action.kind]
    home, last = homes(schedule), max(homes(schedule))
    spans: list[list[tuple[Action, float, float]]] = [[] for _ in schedule]
    there: dict[Message, float] = {}  # since when
    while behind := {r: row[len(spans[r])] for r, row in enumerate(schedule) if len(spans[r]) < len(row)}:
        able = {r: action for r, action in behind.items() if all(each in there for each in needs(action, last))}
        if not able:
            raise ValueError("the schedule deadlocks: " + "; ".join(_waiting(behind, there, last)))
        for r, action in able.items():
            arrivals = [there[each] + hop * (home[each.stage] != r) for each in needs(action, last)]
            start = max([0.0, *arrivals, *(end for _, _, end in spans[r][-1:])])
            spans[r].append((action, start, start + price(action)))
            if message := gives(action):
                there[message] = start + price(action)
    return spans


def _waiting(behind: Mapping[int, Action], there: Mapping[Message, float], last: int) -> Iterator[str]:
    for rank, action in behind.items():
        missing = " and ".join(str(each) for each in needs(action, last) if each not in there)
        yield f"rank {rank}, at {action}, waits for {missing}"


def validate(schedule: Schedule, m: int) -> None:
    """Raise ValueError unless every stage, on one rank, handles each of m micro-batches once and nobody waits for ever.

    A stage handles a micro-batch by F and B, or by F, I and W.
    """
    found = Counter(action for row in schedule for action in row)
    stages = range(1 + max((action.stage for action in found), default=0))
    for stage in stages:
        on = [rank for rank, row in enumerate(schedule) if any(action.stage == stage for action in row)]
        if len(on) > 1:
            raise ValueError(f"stage {stage} must be on one rank, and is on ranks {', '.join(map(str, on))}")
    halved = {action[1:] for action in found if action.kind in "IW"}
    each = [(stage, micro) for stage in stages for micro in range(m)]
    wanted = {Action(kind, *its) for its in each for kind in ("FIW" if its in halved else "FB")}
    for action in [*sorted(wanted), *found]:
        if found[action] != (action in wanted):
            times = f"is there {found[action]} times" if found[action] else "is missing"
            odd = f"does not belong into a schedule of {m} micro-batches"
            raise ValueError(f"{action} {times if action in wanted else odd}")
    simulate(schedule)


def held(row: Row) -> int:
    """How many activations a rank holds at most, one for a micro-batch in a stage: from F to the end of B or W."""
    now = most = 0
    for action in row:
        now += action.kind == "F"
        most = max(most, now)
        now -= action.kind in "BW"
    return most


def bubble(spans: Spans) -> float:
    """The share of all ranks' time, from the first start to the last end, in which a rank does nothing."""
    every = [span for row in spans for span in row]
    whole = max(end for _, _, end in every) - min(start for _, start, _ in every)
    return 1 - sum(end - start for _, start, end in every) / (whole * len(spans))
