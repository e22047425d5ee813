"""Lesson 13, pipelines: 1F1B, a backward in two halves, schedules that deadlock, forwards ahead on a slow wire."""

from math import ceil

from scratch_ddp.course.exercise import Exercise, Wrong
from scratch_ddp.pipeline import Action, gpipe, held, interleaved, schedules, simulate, validate


def one_f_one_b(p, m):
    """Return p rows of F and B for m micro-batches. Rank r has stage r, and does row r.

    F takes one unit of time, B two, messages none. Finish in 3 (m + p - 1) units.
    Rank r may hold p - r activations, each from its F to its B. m may be less than p.
    """
    rows = [[] for _ in range(p)]
    # How many forwards can rank r do until the first gradient comes back?
    for r, row in enumerate(rows):
        ahead = min(p - 1 - r, m)
        row += [Action("F", r, i) for i in range(ahead)]
        for i in range(m):
            if ahead + i < m:
                row.append(Action("F", r, ahead + i))
            row.append(Action("B", r, i))
    # end of the answer
    return rows


def zero_bubble(p, m):
    """Return p rows of F, I and W, one unit of time each, for m >= p micro-batches.

    I needs its F and the I of the next stage; W needs its I. Rank r has stage r.
    Finish in 3 m + p - 1 units. Hold at most p activations a rank, each from F to W.
    """
    # Who waits for an I, and who for a W?
    rows = []
    for r, whole in enumerate(schedules.one_f_one_b(p, m)):
        row = []
        for kind, stage, i in whole:
            row.append(Action("I" if kind == "B" else kind, stage, i))
            if kind == "B" and i >= r:
                row.append(Action("W", stage, i - r))
        rows.append(row + [Action("W", r, i) for i in range(m - r, m)])
    return rows


def _as_schedule(answer, p, m):
    """Many schedules are right: those that are valid, as short as the reference, and hold no more activations."""
    rows = [[Action(*each) for each in row] for row in answer(p, m)]
    try:
        validate(rows, m)
    except ValueError as error:
        raise Wrong("value", str(error)) from None
    yield "value", "the list of kinds", sorted({each.kind for row in rows for each in row})
    yield "value", "the stages of each rank", [sorted({each.stage for each in row}) for row in rows]
    yield "time", "its length in units", max(row[-1][2] for row in simulate(rows))
    for r, row in enumerate(rows):
        most = p - r if any(each.kind == "B" for each in row) else p
        yield "memory", f"the most activations that rank {r} holds", max(held(row), most)


def who_is_stuck(rows):
    """Return the ranks that can't finish their row of F and B, ascending, as a list.

    F needs the F of the stage before. B needs its own F, and the B of the next stage.
    A rank may have several stages, in any order. To send, it waits for nobody.
    """
    last = max(stage for row in rows for _, stage, _ in row)
    # Which ranks can do their next action, and what changes when one of them does?

    def needed(kind, stage, i):
        if kind == "F":
            return {Action("F", stage - 1, i)} if stage else set()
        return {Action("F", stage, i)} | ({Action("B", stage + 1, i)} if stage < last else set())

    done, left = set(), [list(row) for row in rows]
    able = left
    while able:
        able = [row for row in left if row and needed(*row[0]) <= done]
        done |= {row.pop(0) for row in able}
    return [r for r, row in enumerate(left) if row]


def _row(actions, micro=0):
    """From kinds and stages, as in "F0 B0"."""
    return [Action(each[0], int(each[1:]), micro) for each in actions.split()]


def forwards_ahead(forward, backward, hop):
    """Return by how many forwards a rank must be ahead of the next one; 1F1B has 1.

    Find the smallest int with which neither waits once the pipeline is full.
    A micro-batch takes `forward` and `backward` seconds, a message `hop` seconds.
    """
    # When is the gradient of a forward back? What can its rank do until then?
    return 1 + ceil(2 * hop / (forward + backward))


_ROWS = {  # grids that run; grids that hang, each for one reason; the last two have ranks with several stages
    "GPipe, 4 ranks": (gpipe(4, 4),),
    "two stages a rank": (interleaved(2, 4, 2),),
    "the first stage on the last rank": (gpipe(4, 4)[::-1],),
    "each waits for the other": ([[*_row("F0 B0"), *_row("F0 B0", micro=1)], gpipe(2, 2)[1]],),
    "a backward before its own forward": ([gpipe(2, 2)[0], [*_row("F1 B1"), *_row("B1 F1", micro=1)]],),
    "the second lap before the first": ([_row("F2 F0 B2 B0"), _row("F1 F3 B3 B1")],),
    "some finish, some don't": ([_row("F0 F2 B2 B0"), _row("F1 F3 B1 B3"), _row("F4 B4")],),
}
_GIVEN = "from scratch_ddp.pipeline import Action"
_GRIDS = ((4, 8), (2, 4), (4, 2), (1, 3), (5, 5))  # p, m
_LONG_GRIDS = ((4, 8), (2, 4), (3, 3), (1, 2), (5, 9))
_WIRES = ((1.0, 2.0, 0.0), (1.0, 2.0, 1.5), (1.0, 2.0, 1.625), (2.0, 2.0, 8.0))  # exact in binary: nothing is rounded
EXERCISES = (
    Exercise(one_f_one_b, _GRIDS, _as_schedule, given=_GIVEN),
    Exercise(zero_bubble, _LONG_GRIDS, _as_schedule, given=f"{_GIVEN}, schedules"),
    Exercise(who_is_stuck, _ROWS, given=_GIVEN),
    Exercise(forwards_ahead, _WIRES, given="from math import ceil"),
)
