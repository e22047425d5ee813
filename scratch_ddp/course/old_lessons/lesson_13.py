"""Lesson 13, pipelines: 1F1B, a backward in two halves, schedules that deadlock, forwards ahead on a slow wire."""

from math import ceil
from typing import Any

import torch

from scratch_ddp.course.exercise import Exercise
from scratch_ddp.course.trial import Trial
from scratch_ddp.pipeline import Action, gpipe, held, interleaved, schedules, simulate, validate


def one_f_one_b(p, m):
    """Return a list of p rows of actions. Rank r has stage r alone, and carries out row r.

    m, the number of micro-batches, is at least 1. An action is Action(kind, stage, micro-batch), or a
    tuple of these three. Each rank does F (one unit of time) and B (two units) of every micro-batch.
    Messages take no time. Everything is done after 3 (m + p - 1) units, as `simulate` computes it.
    Rank r holds at most p - r activations: one is held from the F of its micro-batch until the end of
    its B.
    """
    rows = [[] for _ in range(p)]
    # How many forwards can rank r do until the first gradient comes back?
    # answer: begin
    for r, row in enumerate(rows):
        ahead = min(p - 1 - r, m)
        row += [Action("F", r, i) for i in range(ahead)]
        for i in range(m):
            if ahead + i < m:
                row.append(Action("F", r, ahead + i))
            row.append(Action("B", r, i))
    # answer: end
    return rows


def zero_bubble(p, m):
    """Return a list of p rows of actions. Rank r has stage r alone, and carries out row r.

    m, the number of micro-batches, is at least p. An action is Action(kind, stage, micro-batch), or a
    tuple of these three. Each rank does F, I and W of every micro-batch, a unit each. I needs the F of
    its stage, and the I of stage + 1 if there is one; W needs the I of its stage: all for the same
    micro-batch. Messages take no time. Everything is done after 3 m + p - 1 units, as `simulate`
    computes it. No rank holds more than p activations: one is held from the F of its micro-batch
    until the end of its W.
    """
    # Who waits for an I, and who for a W?
    # answer: begin
    rows = []
    for r, whole in enumerate(schedules.one_f_one_b(p, m)):
        row = []
        for kind, stage, i in whole:
            row.append(Action("I" if kind == "B" else kind, stage, i))
            if kind == "B" and i >= r:
                row.append(Action("W", stage, i - r))
        rows.append(row + [Action("W", r, i) for i in range(m - r, m)])
    return rows
    # answer: end


def who_is_stuck(rows):
    """Return the ranks that can't carry out their row to its end, in ascending order; [] if all can.

    Actions are F and B, each there once. A rank may have several stages, or an empty row; a stage is
    on one rank. A rank carries out its row in order. F of stage s needs the F of stage s - 1, if there
    is one. B of stage s needs the F of stage s, and the B of stage s + 1 if there is one: all for the
    same micro-batch. To send, a rank waits for nobody. `rows` stays as it is.
    """
    last = max((stage for row in rows for _, stage, _ in row), default=0)
    # Which ranks can do their next action, and what changes when one of them does?
    # answer: begin

    def needed(kind, stage, i):
        if kind == "F":
            return {Action("F", stage - 1, i)} if stage else set()
        return {Action("F", stage, i)} | ({Action("B", stage + 1, i)} if stage < last else set())

    done = set()
    at = [0] * len(rows)
    progress = True
    while progress:
        progress = False
        for r, row in enumerate(rows):
            while at[r] < len(row) and needed(*row[at[r]]) <= done:
                done.add(row[at[r]])
                at[r] += 1
                progress = True
    return [r for r, row in enumerate(rows) if at[r] < len(row)]
    # answer: end


def forwards_ahead(forward, backward, hop):
    """Return how many forwards a rank must be ahead of the next one so that neither waits once the
    pipeline is full: the smallest int that is enough. 1F1B has 1.

    forward, backward: seconds that any rank takes for a micro-batch, more than 0. hop: seconds that a
    message between two ranks takes, 0 or more. The times are exact in binary: nothing is rounded.
    """
    # After how many seconds is the gradient of a forward back? What can its rank do until then?
    # answer: begin
    return 1 + ceil(2 * hop / (forward + backward))
    # answer: end


def examine_one_f_one_b(trial: Trial) -> None:
    """V: a valid schedule; time; memory on each rank."""
    for p, m in ((4, 8), (2, 4), (4, 2), (1, 3), (3, 7), (5, 5), (9, 70)):
        result = trial.call(p, m, case=f"p = {p}, m = {m}")
        _examine_rows(trial, result, p, m, "FB", 3 * (m + p - 1), [p - r for r in range(p)])
        trial.cost(calls={})


def examine_zero_bubble(trial: Trial) -> None:
    """V: a valid schedule; time; memory."""
    for p, m in ((4, 8), (2, 4), (3, 3), (4, 17), (1, 2), (5, 9), (8, 70)):
        result = trial.call(p, m, case=f"p = {p}, m = {m}")
        _examine_rows(trial, result, p, m, "FIW", 3 * m + p - 1, [p] * p)
        trial.cost(calls={})


def _examine_rows(trial: Trial, result: Any, p: int, m: int, kinds: str, units: int, most: list[int]) -> None:
    complaint = _not_rows(result, p, kinds)
    rows = [] if complaint else [[Action(*each) for each in row] for row in result]
    complaint = complaint or _invalid(rows, m)
    trial.criterion("value", complaint)
    if complaint:
        return
    needed = max(row[-1][2] for row in simulate(rows))
    trial.criterion("time", f"takes {needed:g} units, budget {units}" if needed > units else "")
    for r, (row, budget) in enumerate(zip(rows, most, strict=True)):
        if held(row) > budget:
            trial.criterion("memory", f"row {r} holds {held(row)} activations, budget {budget}")
    trial.criterion("memory", "")


def _not_rows(result: Any, p: int, kinds: str) -> str:
    if not isinstance(result, list | tuple) or len(result) != p or not all(isinstance(r, list | tuple) for r in result):
        return f"should be a list of {p} rows"
    for r, row in enumerate(result):
        for each in row:
            if not (isinstance(each, tuple) and len(each) == 3 and all(type(number) is int for number in each[1:])):
                return f"row {r} should hold Action(kind, stage, micro-batch) alone"
            if not isinstance(each[0], str) or each[0] not in tuple(kinds):
                return f"row {r} should have the kinds {', '.join(kinds)} alone"
            if each[1] != r:
                return f"row {r} has an action of stage {each[1]}, should have stage {r} alone"
    return ""


def _invalid(rows: list[list[Action]], m: int) -> str:
    try:
        validate(rows, m)
    except ValueError as error:
        return str(error)
    return ""


def examine_who_is_stuck(trial: Trial) -> None:
    """V on grids that run, and on rows in another order: two actions exchanged, or all of a row shuffled."""
    generator = trial.generator()
    grids = {"GPipe": gpipe(4, 4), "1F1B": one_f_one_b(4, 8), "two stages a rank": interleaved(2, 4, 2)}
    f0, b0, f1, b1 = (Action(kind, 0, i) for i in range(2) for kind in "FB")
    other = [Action("F", 1, 0), Action("F", 1, 1), Action("B", 1, 0), Action("B", 1, 1)]
    for name, rows in grids.items():
        _examine_stuck(trial, rows, name)
        _examine_stuck(trial, [row[::-1] for row in rows], f"{name}, all rows reversed")
    _examine_stuck(trial, [[f0, b0, f1, b1], other], "each waits for the other")
    _examine_stuck(trial, [[f0, f1, b0, b1], other], "no longer")
    _examine_stuck(trial, [other, [f0, b0, f1, b1]], "each waits for the other, the last stage on the first rank")
    _examine_stuck(trial, [[f1, b1, f0, b0], other], "each waits for the other, the later micro-batch first")
    _examine_stuck(trial, gpipe(4, 4)[::-1], "the first stage on the last rank")
    _examine_stuck(trial, [*gpipe(2, 2), []], "a rank with nothing to do")
    _examine_stuck(trial, [[], []], "no rank has anything to do")
    _examine_stuck(trial, one_f_one_b(2, 240), "240 micro-batches")
    _examine_stuck(trial, [*gpipe(12, 1)[:11], gpipe(12, 1)[11][::-1]], "12 ranks, the last in reverse")
    _examine_stuck(trial, [[f0, f1, b0, b1], [other[0], other[3], other[1], other[2]]], "a backward before its forward")
    _examine_stuck(trial, [*gpipe(4, 2)[:3], gpipe(4, 2)[3][::-1]], "the last rank begins with its backwards")
    laps = ["F0 F2 B2 B0", "F1 F3 B1 B3", "F4 B4"]  # kinds and stages
    rows = [[Action(each[0], int(each[1]), 0) for each in row.split()] for row in laps]
    _examine_stuck(trial, rows, "two stages a rank, of which one has the earlier backward first")
    for number in range(4):
        rows = _some_stuck(generator)
        _examine_stuck(trial, rows, f"six stages, of which one rank has the last two ({number}, seed {trial.seed})")
    for name, rows in grids.items():
        for number in range(6):
            r, (one, other) = number % len(rows), torch.randint(len(rows[0]), (2,), generator=generator).tolist()
            changed = [list(row) for row in rows]
            changed[r][one], changed[r][other] = changed[r][other], changed[r][one]
            case = f"{name}, row {r}: places {one} and {other} exchanged (seed {trial.seed})"
            _examine_stuck(trial, changed, case)


def _some_stuck(generator: torch.Generator) -> list[list[Action]]:
    """All forwards are in order. The rank of the last two stages ends its row, whatever the others' backwards do."""
    owners = [*torch.randint(2, (4,), generator=generator).tolist(), 2, 2]
    rows = []
    for rank in range(3):
        stages = [stage for stage, owner in enumerate(owners) if owner == rank]
        forwards, backwards = ([Action(kind, stage, i) for stage in stages for i in range(2)] for kind in "FB")
        order = torch.randperm(len(backwards), generator=generator).tolist()
        rows.append(forwards + ([backwards[place] for place in order] if rank < 2 else backwards[::-1]))
    return [rows[rank] for rank in torch.randperm(3, generator=generator).tolist()]


def _examine_stuck(trial: Trial, rows: list, case: str) -> None:
    mine = [list(row) for row in rows]
    trial.value(trial.call(mine, case=case), who_is_stuck(rows))
    trial.cost(calls={})


_WIRES = {  # forward, backward, hop: forwards ahead
    "no time on the wire": (1.0, 2.0, 0.0, 1),
    "a fast wire": (1.0, 2.0, 0.125, 2),
    "a hop of half a micro-batch": (1.0, 2.0, 1.5, 2),
    "a hop of a little more": (1.0, 2.0, 1.625, 3),
    "a slow wire": (2.0, 2.0, 8.0, 5),
    "milliseconds": (1 / 1024, 2 / 1024, 6 / 1024, 5),
    "backward as long as forward": (1.0, 1.0, 1.5, 3),
    "a very slow wire": (1.0, 2.0, 30.0, 21),
    "a wire to the moon": (1.0, 1.0, 200.0, 201),
    "microseconds": (2.0**-20, 2.0**-19, 6 * 2.0**-20, 5),
    "a hop of hardly more": (1.0, 1.0, 1 + 2.0**-22, 3),
}


def examine_forwards_ahead(trial: Trial) -> None:
    """V on times that are exact in binary."""
    for case, (forward, backward, hop, expected) in _WIRES.items():
        trial.value(trial.call(forward, backward, hop, case=f"{case}: {forward:g}, {backward:g}, {hop:g}"), expected)
        trial.cost(calls={})
    for times in (torch.randint(1, 65, (6, 3), generator=trial.generator()) / 8).tolist():
        trial.value(
            trial.call(*times, case=f"{', '.join(map(str, times))} (seed {trial.seed})"), forwards_ahead(*times)
        )
        trial.cost(calls={})


def with_forwards_ahead(p: int, m: int, k: int) -> list[list[Action]]:
    """1F1B on p ranks, each of which is k forwards ahead of the next one."""
    rows = []
    for r in range(p):
        ahead = min(k * (p - 1 - r), m)
        forwards, backwards = ([Action(kind, r, i) for i in range(m)] for kind in "FB")
        pairs = [each for pair in zip(forwards[ahead:], backwards, strict=False) for each in pair]
        rows.append([*forwards[:ahead], *pairs, *backwards[m - ahead :]])
    return rows


GIVEN = "from scratch_ddp.pipeline import Action"
ONE_F_ONE_B = Exercise(one_f_one_b, examine_one_f_one_b, given=GIVEN)
ZERO_BUBBLE = Exercise(zero_bubble, examine_zero_bubble, given=f"{GIVEN}, schedules", also_named=("zb_h1",))
WHO_IS_STUCK = Exercise(who_is_stuck, examine_who_is_stuck, given=GIVEN, also_named=("simulate", "validate"))
FORWARDS_AHEAD = Exercise(forwards_ahead, examine_forwards_ahead, given="from math import ceil")
EXERCISES = (ONE_F_ONE_B, ZERO_BUBBLE, WHO_IS_STUCK, FORWARDS_AHEAD)
