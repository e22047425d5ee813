"""Lesson 12, where the time went: a step in parts, the rank that others wait for, and the culprit of a slow job.

The reference of the optional `sync_batch_norm` is the package's own function.
"""

import statistics
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.course.exercise import Exercise
from scratch_ddp.course.lessons import with_backward
from scratch_ddp.ddp.batch_norm import sync_batch_norm


def split_step(rank, step, computing, calls):
    """Split the step of `rank` into [computing, waiting, transfer, idle] seconds.

    step: (start, end). computing: a list of (start, end). calls[r]: rank r's
    collectives in order, as (called, ended). Computing wins, then transfer (everybody
    has called), then waiting. Intervals may overlap and stick out of the step.
    """
    # Since when can the k-th collective be on its way? Between which moments does
    # nothing change?
    ready = [max(called for called, _ in same) for same in zip(*calls, strict=True)]
    mine = [(called, since, ended) for (called, ended), since in zip(calls[rank], ready, strict=True)]
    start, end = step
    moments = {start, end, *(at for each in [*computing, *mine] for at in each)}
    parts = [0.0, 0.0, 0.0, 0.0]
    for a, b in pairwise(sorted(at for at in moments if start <= at <= end)):
        if any(since <= a and b <= until for since, until in computing):
            part = 0
        elif any(since <= a and b <= ended for _, since, ended in mine):
            part = 2
        elif any(called <= a and b <= ended for called, _, ended in mine):
            part = 1
        else:
            part = 3
        parts[part] += b - a
    return parts


def find_straggler(called, group=None):
    """Return the number in `group` of the rank the others waited for longest, or None.

    `called`, an int64 tensor, holds when this rank called each collective, in ns. Each
    rank waits from its own call to the last one, for the rank that made that. Ties go
    to the lowest rank. None if nobody waits. Cost: one all-gather.
    """
    # Which rank can tell from its own calls alone who was late?
    everyones = [torch.empty_like(called) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyones, called, group=group)
    waited_for = [0] * len(everyones)
    for same in zip(*(each.tolist() for each in everyones), strict=True):
        last = max(same)
        waited_for[same.index(last)] += sum(last - at for at in same)
    most = max(waited_for)
    return waited_for.index(most) if most else None


def _times(at):
    """Times of the day in nanoseconds: float32 can't hold them."""
    first, second, last = (at.rank == rank for rank in (0, 1, at.n - 1))
    for case, after in {
        "the last rank is late": (5 * last, 7 * last, 6 * last),
        "rank 0 is late often, the last rank once and for long": (3 * first, 4 * first, 90 * last, 2 * first),
        "two cost the others as much": (30 * last, 30 * first),
        "rank 0 and another are late each time": (50 * first or 60 * second, 50 * first or 60 * last),
        "all are late for one, then one for all": (50 * (not second), 40 * last),
        "nobody waits": (0, 0),
    }.items():
        yield case, (torch.tensor([10**15 + 1000 * k + late for k, late in enumerate(after)]),)


def culprit(steps, messages):
    """Name a fault of the game and its rank (None: no rank's), as in ("straggler", 2).

    steps[k][r]: what rank r did in step k, all of it, a dict of seconds: "data",
    "forward", "backward", "waiting", "transfer". messages: (bytes, seconds in transfer)
    of each that rank 0 sent in all these steps; small is below 1 KB. A rank that takes
    a fifth of a step longer than most is at fault; a few per cent are noise.
    """
    # What does each rank do by itself? Is it the same rank in most steps? If ranks are
    # alike: do small messages explain the transfer?
    ranks = range(len(steps[0]))
    whole = statistics.median(sum(step[0].values()) for step in steps)
    loading = [statistics.median(step[rank]["data"] for step in steps) for rank in ranks]
    if max(loading) > 0.2 * whole:
        return "loader", loading.index(max(loading))

    computing = [[step[rank]["forward"] + step[rank]["backward"] for rank in ranks] for step in steps]
    behind = [max(each) - statistics.median(each) for each in computing]  # by how much the slowest rank is
    if statistics.median(behind) > 0.2 * whole:
        slowest = [each.index(max(each)) for each in computing]
        often = statistics.mode(slowest)
        if slowest.count(often) > len(steps) / 2:
            return "straggler", often
        return "uneven batches", None

    small = sum(seconds for size, seconds in messages if size < 1024)  # bytes: such a message holds no gradient
    transfer = statistics.median(step[0]["transfer"] for step in steps)
    return ".item()" if small / len(steps) > transfer / 2 else "last bucket", None


def _profiles(at):
    """Six steps of four ranks, as the game records them: with noise, stalls in two steps, a small message in each."""
    names = ("data", "forward", "backward", "waiting", "transfer")
    for fault in ("loader", "straggler", "uneven batches", ".item()", "last bucket"):
        busy = torch.tensor([4e-3, 32e-3, 64e-3]) * (1 + 0.03 * torch.rand(6, 4, 3))  # data, forward, backward
        late = {"straggler": [3] * 6, "uneven batches": [0, 1, 3, 1, 0, 3]}.get(fault, [])
        busy[range(len(late)), late, 1:] *= 1.8
        busy[:, 0, 2] *= 1.1  # less than a fault
        busy[:, 1, 0] += 60e-3 * (fault == "loader")
        busy[:2, [0, 2], [0, 2]] += 0.6
        messages = [(4, 4e-3), *[(67_416, 12e-3)] * 3, (337_080, 44e-3) if fault == "last bucket" else (67_416, 12e-3)]
        messages += [(6, 4e-3)] * 10 * (fault == ".item()")
        transfer = torch.full((6, 4, 1), {".item()": 52e-3, "last bucket": 44e-3}.get(fault, 12e-3))
        waiting = busy.sum(2, keepdim=True).amax(1, keepdim=True) - busy.sum(2, keepdim=True)
        waiting[:, [0, 2, 3]] += 60e-3 * (fault == ".item()")  # for rank 1, which another program holds up
        steps = torch.cat([busy, waiting, transfer], dim=2).tolist()
        steps = [[dict(zip(names, rank, strict=True)) for rank in step] for step in steps]
        yield f"{fault} planted", (steps, 6 * messages)


def _rows(at):
    for case, rows in {"rank r has 2 + r rows": 2 + at.rank, "rank 0 has no rows": 3 * at.rank}.items():
        norm = nn.BatchNorm1d(3).double()
        nn.init.uniform_(norm.weight)
        x = 5 + (1 + at.rank) * torch.randn(at.n, rows, 3).double()[at.rank]
        yield case, (x, norm)
    yield "two values a row", (x.new_tensor(range(6)).view(1, 3, 2) + torch.randn(2, 3, 2).double(), norm)
    yield "in eval mode", (x, norm.eval())


_STEPS = (  # rank, step, computing, calls of rank 0 and of rank 1
    (0, (0, 8), [(0, 3)], [[(3, 8)], [(6, 8)]]),  # a rank that waits, and the one that is waited for
    (1, (0, 8), [(0, 6)], [[(3, 8)], [(6, 8)]]),
    (0, (0, 8), [(0, 6)], [[(2, 7)], [(3, 7)]]),
    (0, (0, 9), [(5, 6), (0, 2)], [[(1, 8)], [(4, 8)]]),
    (0, (0, 9), [(0, 1)], [[(1, 5), (2, 9)], [(1, 5), (7, 9)]]),  # the second is not ready
    (0, (0, 9), [], [[(1, 7), (2, 8)], [(4, 7), (3, 8)]]),  # two under way at once
    (0, (2, 6), [], [[(0, 9)], [(4, 9)]]),
    (0, (0, 9), [(0, 2)], [[(2, 5)], [(3, 7)]]),
    (0, (2, 6), [(0, 4), (1, 3), (5, 9)], [[], []]),  # computing before and after the step, and inside other computing
)
EXERCISES = (
    Exercise(split_step, _STEPS, close=1e-9, given="from itertools import pairwise"),
    Exercise(find_straggler, _times),
    Exercise(culprit, _profiles, given="import statistics"),
    Exercise(sync_batch_norm, _rows, use=with_backward, close=1e-6),
)
