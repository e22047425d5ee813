"""Lesson 12, where the time went: a step in parts, the rank that others wait for, BatchNorm over all ranks."""

import copy
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.course.exercise import Exercise
from scratch_ddp.course.guard import GRADIENTS
from scratch_ddp.course.inputs.one_process import tried_in_worlds
from scratch_ddp.course.trial import Trial
from scratch_ddp.ddp.batch_norm import sync_batch_norm
from scratch_ddp.instruments.traffic import ring_bytes

Calls = list[list[tuple[float, float]]]


def split_step(rank, step, computing, calls):
    """Return a list of four floats, [computing, waiting, transfer, idle]: seconds of a rank's step.

    rank: whose step. step: (start, end). computing: a list of (start, end) in which it computed.
    calls[r]: the collectives of rank r in order, as (called, ended), as many for each rank. None ends
    before all ranks have called it. All times are of one clock, any numbers. Intervals may overlap,
    take no time, and stick out of the step; those of computing are in any order.
    While the rank computes, it is computing, whatever else goes on. Otherwise: transfer, if it has
    called a collective that has not ended on it, and all others have called it, too; else waiting, if
    it has called one that has not ended; else idle. So the four add up to the step.
    Nothing is rounded. Cost: nothing is sent.
    """
    # Since when can the k-th collective be on its way? Between which moments does nothing change?
    # answer: begin
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
    # answer: end


def find_straggler(called, group=None):
    """Return the rank in `group` for which the others waited longest; None if nobody waited.

    called: a contiguous int64 tensor (collectives,): when this rank called each of its collectives,
    in nanoseconds on a clock that all ranks share. As many on every rank, perhaps none.
    All ranks wait for the one that calls a collective last, each from its own call on: add that up
    over ranks and collectives. If several are last, the lowest of them counts; of ranks that others
    waited for equally long, return the lowest. The result is an int, the same on every rank.
    Cost: one all-gather of `called`, also if it is empty.
    """
    # Which rank can tell from its own calls alone who was late?
    # answer: begin
    everyones = [torch.empty_like(called) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyones, called, group=group)
    waited_for = [0] * len(everyones)
    for same in zip(*(each.tolist() for each in everyones), strict=True):
        last = max(same)
        waited_for[same.index(last)] += sum(last - at for at in same)
    most = max(waited_for)
    return waited_for.index(most) if most else None
    # answer: end


_STEPS = {  # case: (step, computing, calls of rank 0 and of the next, [computing, waiting, transfer, idle] of rank 0)
    "nothing recorded": ((0, 8), [], ([], []), [0, 0, 0, 8]),
    "a rank that waits": ((0, 8), [(0, 3)], ([(3, 8)], [(6, 8)]), [3, 3, 2, 0]),
    "the rank that is waited for": ((0, 8), [(0, 6)], ([(6, 8)], [(3, 8)]), [6, 0, 2, 0]),
    "a message behind backward": ((0, 8), [(0, 6)], ([(2, 7)], [(3, 7)]), [6, 0, 1, 1]),
    "a gap in computing": ((0, 9), [(5, 6), (0, 2)], ([(1, 8)], [(4, 8)]), [3, 2, 3, 1]),
    "two collectives, the second not ready": ((0, 9), [(0, 1)], ([(1, 5), (2, 9)], [(1, 5), (7, 9)]), [1, 2, 6, 0]),
    "two collectives under way at once": ((0, 9), [], ([(1, 7), (2, 8)], [(4, 7), (3, 8)]), [0, 2, 5, 2]),
    "called before the step, ended after it": ((2, 6), [], ([(0, 9)], [(4, 9)]), [0, 2, 2, 0]),
    "computing before and after the step": ((2, 6), [(0, 3), (5, 9)], ([], []), [2, 0, 0, 2]),
    "computing inside other computing": ((0, 6), [(0, 4), (1, 2)], ([(4, 5)], [(4, 5)]), [4, 0, 1, 1]),
    "a transfer that takes no time": ((0, 6), [(0, 2)], ([(2, 5)], [(5, 5)]), [2, 3, 0, 1]),
    "busy all the time": ((0, 4), [(0, 2), (2, 4)], ([(1, 3)], [(2, 3)]), [4, 0, 0, 0]),
    "before time zero": ((-9, -1), [(-9, -6)], ([(-6, -2)], [(-4, -2)]), [3, 2, 2, 1]),
    "an early end elsewhere": ((0, 8), [(0, 1)], ([(1, 7)], [(2, 3)]), [1, 1, 5, 1]),
}


def examine_split_step(trial: Trial) -> None:
    """V on times that are exact in binary; sum: the parts are the step. Each rank is asked about other steps."""
    for case, (step, computing, calls, expected) in _STEPS.items():
        for place in range(2):  # the same step, told of rank 0 or of the last of three
            told = [calls[0], calls[1], calls[1]] if place == 0 else [calls[1], calls[1], calls[0]]
            _examine_step(trial, case, 2 * place, step, computing, told, expected)
    generator = torch.Generator().manual_seed(trial.seed + trial.rank)
    for unit, began in ((2.0**-10, -0.25), (2.0**-20, 2.0**20), (1.0, -30.0)):
        for ranks in (1, 2, 5):
            step, computing, calls = _drawn_step(generator, ranks)
            rank = trial.seed % ranks  # the same for all, since the case names it
            expected = _parts_by_counting(rank, step, computing, calls)
            scaled = [[(began + unit * a, began + unit * b) for a, b in each] for each in ([step], computing, *calls)]
            case = f"{ranks} ranks, units of {unit:g} s from {began:g} s on, drawn with seed {trial.seed}"
            _examine_step(trial, case, rank, scaled[0][0], scaled[1], scaled[2:], [unit * each for each in expected])


def _examine_step(trial: Trial, case: str, rank: int, step: Any, computing: Any, calls: Any, expected: list) -> None:
    start, end = map(float, step)
    mine = [(float(a), float(b)) for a, b in computing]
    told = [[(float(a), float(b)) for a, b in each] for each in calls]
    result = trial.call(rank, (start, end), mine, told, case=f"{case}, asked about rank {rank}")
    numbers = isinstance(result, list) and all(type(each) in (int, float) for each in result)
    whole = sum(result) if numbers else end - start
    complaint = f"the parts add up to {whole:g}, the step is {end - start:g}"
    trial.criterion("sum", complaint if abs(whole - (end - start)) > 1e-6 * (end - start) else "")
    if numbers:
        result = [float(each) for each in result]
    trial.value(result, [float(each) for each in expected], "[computing, waiting, transfer, idle]")
    trial.cost(calls={})


def _drawn_step(generator: torch.Generator, ranks: int) -> tuple[tuple[int, int], list, Calls]:
    """Whole numbers from 0 to 40. Collectives end after every rank has called them."""

    def numbers(low: int, high: int, count: int) -> list[int]:
        return torch.randint(low, high, (count,), generator=generator).tolist()

    computing = [(a, a + b) for a, b in zip(numbers(0, 36, 5), numbers(0, 5, 5), strict=True)]
    calls: Calls = [[] for _ in range(ranks)]
    for first in sorted(numbers(0, 30, 3)):
        called = [first + late for late in numbers(0, 6, ranks)]
        ends = numbers(max(called), max(called) + 5, ranks)
        for mine, at, ended in zip(calls, called, ends, strict=True):
            mine.append((at, ended))
    return (4, 38), computing, calls


def _parts_by_counting(rank: int, step: tuple[int, int], computing: list, calls: Calls) -> list[int]:
    """By looking at each unit of time."""
    parts = [0, 0, 0, 0]
    for hour in range(*step):
        pending = [k for k, (called, ended) in enumerate(calls[rank]) if called <= hour < ended]
        moving = [k for k in pending if all(each[k][0] <= hour for each in calls)]
        if any(a <= hour < b for a, b in computing):
            parts[0] += 1
        else:
            parts[2 if moving else 1 if pending else 3] += 1
    return parts


def examine_find_straggler(trial: Trial) -> None:
    """V on the traces of some collectives; A; C, with many collectives too, on one rank."""
    n, generator = trial.size, trial.generator()
    late = int(torch.randint(n, (), generator=generator))
    base = 1_000_000_000 * (1_800_000_000 + trial.seed)  # nanoseconds since 1970; float64 rounds them
    noise = torch.randint(0, 1000, (n, 9), generator=generator)
    steady, once, seldom = noise.clone(), noise.clone(), noise.clone()
    steady[late] += 5000  # late in each
    once[late, 4] += 40_000  # late in one, by more than another is in the others
    once[(late + 1) % n, :4] += 3000
    seldom[late, :2] += 2000  # late twice, and early otherwise
    seldom[late, 2:] -= 5000
    first, second = torch.arange(n) < 2, torch.arange(n) == 1
    traces = {
        f"rank {late} is late each time": steady,
        f"rank {late} is late once": once,
        f"rank {late} is late twice, and early otherwise": seldom,
        "nobody is late": noise[:1].repeat(n, 1),
        "no collective": noise[:, :0],
        "one collective": noise[:, :1],
        "the first and the last rank are late, equally": (torch.arange(n) % max(n - 1, 1) == 0)[:, None] * 100,
        "by some seconds": noise[:, :2] + (torch.arange(n) == late)[:, None] * (2**32 - 5000),
        "ranks 0 and 1 are late together, then rank 1 alone": torch.stack([100 * first, 10 * second], dim=1),
        "by one nanosecond": (torch.arange(n) == late)[:, None] * 1,
    }
    for number in range(3):
        traces[f"trace {number}"] = torch.randint(0, 50, (n, 4), generator=generator)
    for case, trace in traces.items():
        expected = _waited_for(trace.tolist())
        mine = (base + trace[trial.rank]).contiguous().to(trial.device)
        result = trial.call(mine, case=f"{case} (drawn with seed {trial.seed})")
        trial.value(result, expected, "the straggler")
        trial.agreement(result)
        trial.cost(calls={"all_gather": 1}, max_wire_bytes=ring_bytes("all_gather", mine.nbytes, n, 0))
    many = {"70,001 collectives": lambda: [(torch.arange(70_001),)]}
    for _, world in tried_in_worlds(trial, many if trial.on_all_ranks else {}):
        trial.value(world.results[0], None, f"{world.place} the straggler")
        trial.criterion("cost", world.over_budget({"all_gather": 1}, 1 << 60), world.place)


def _waited_for(trace: list[list[int]]) -> int | None:
    cost = dict.fromkeys(range(len(trace)), 0)
    for k in range(len(trace[0])):
        column = [row[k] for row in trace]
        cost[column.index(max(column))] += sum(max(column) - each for each in column)
    worst = max(cost, key=lambda rank: (cost[rank], -rank))
    return worst if cost[worst] else None


_BATCHES = {  # case: (shape behind the rows, dtype, mean, tolerance, momentum)
    "float64": ((5,), torch.float64, 0.0, 1e-9, 0.1),
    "one feature": ((1,), torch.float64, 3.0, 1e-9, 0.5),
    "pictures": ((3, 2, 4), torch.float64, -1.0, 1e-9, 0.25),
    "float32": ((4,), torch.float32, 0.0, 1e-4, 0.1),
    "float32 about 1000": ((4,), torch.float32, 1000.0, 3e-3, 0.1),
}


def examine_sync_batch_norm(trial: Trial) -> None:
    """V against one process, forward and backward, twice in training and once in eval mode; A of statistics; C."""
    generator, n = trial.generator(), trial.size
    for case, (shape, dtype, mean, tolerance, momentum) in _BATCHES.items():
        features = shape[0]
        norm = (nn.BatchNorm1d if len(shape) == 1 else nn.BatchNorm2d)(features, eps=1e-2, momentum=momentum).to(dtype)
        with torch.no_grad():
            for tensor in (norm.weight, norm.bias, norm.running_mean, norm.running_var):
                tensor.copy_(torch.rand(features, generator=generator) + 0.5)
        norm.to(trial.device)
        alone = copy.deepcopy(norm).double()
        for step in range(3):
            rows = torch.randint(1, 5, (n,), generator=generator).tolist()
            rows[step % n] = 0 if step < 2 and n > 1 else 3
            rows[(step + 1) % n] += 2
            whole, grads = (torch.randn(sum(rows), *shape, generator=generator, dtype=torch.float64) for _ in "xg")
            whole = (whole * torch.arange(1.0, features + 1).view(-1, *[1] * (len(shape) - 1)) + mean).to(dtype)
            if step == 2:
                norm.eval(), alone.eval()
            what = f"{case}, {'eval mode' if step == 2 else f'step {step}'}, rows {rows}, drawn with seed {trial.seed}"
            given = (whole.to(trial.device), grads.to(trial.device, dtype), rows, tolerance)
            _examine_batch(trial, what, norm, alone, *given)


def _examine_batch(
    trial: Trial, case: str, norm: nn.Module, alone: nn.Module, whole: Any, grads: Any, rows: list, tolerance: float
) -> None:
    mine = slice(sum(rows[: trial.rank]), sum(rows[: trial.rank + 1]))
    x = whole[mine].transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()  # not contiguous
    training = norm.training
    buffers = [norm.running_mean, norm.running_var, norm.num_batches_tracked] if training else []
    y = trial.call(x, norm, case=f"forward, {case}", changes=buffers)
    trial.cost(calls={"all_reduce": int(training)}, max_wire_bytes=_budget(trial, 2 * norm.num_features + 1))
    everyones = whole.double().requires_grad_()
    expected = alone(everyones)
    expected.backward(grads.double())
    trial.value(y, expected[mine].detach().to(x.dtype), "the output", tolerance)
    for name in ("running_mean", "running_var"):
        trial.value(getattr(norm, name), getattr(alone, name).to(x.dtype), name, max(tolerance, 1e-6))
        trial.agreement(getattr(norm, name))
    trial.value(norm.num_batches_tracked, alone.num_batches_tracked, "num_batches_tracked")
    trial.end_if_wrong()
    norm.zero_grad()
    trial.call(y, grads[mine].clone(), x, norm, case=f"backward, {case}", using=_backward, changes=[GRADIENTS, x])
    trial.cost(calls={"all_reduce": int(training)}, max_wire_bytes=_budget(trial, 2 * norm.num_features + 1))
    trial.value(x.grad, everyones.grad[mine].to(x.dtype), "x.grad", tolerance)
    with torch.no_grad():
        normed = (expected - alone.bias.view(1, -1, *[1] * (whole.dim() - 2))) / alone.weight.view(
            1, -1, *[1] * (whole.dim() - 2)
        )
        others = [dim for dim in range(whole.dim()) if dim != 1]
        parts = {"weight": (normed * grads)[mine].sum(others), "bias": grads[mine].double().sum(others)}
    for name, part in parts.items():
        trial.value(getattr(norm, name).grad, part.to(x.dtype), f"the gradient of {name}", 10 * tolerance)


def _backward(_: Any, y: torch.Tensor, gradient: torch.Tensor, *__: Any) -> None:
    y.backward(gradient)


def _budget(trial: Trial, numbers: int) -> int:
    """Bytes of an all-reduce of so many float64 numbers, on the rank with most."""
    return max(ring_bytes("all_reduce", 8 * numbers, trial.size, rank) for rank in range(trial.size))


SPLIT_STEP = Exercise(split_step, examine_split_step, given="from itertools import pairwise")
FIND_STRAGGLER = Exercise(find_straggler, examine_find_straggler)
SYNC_BATCH_NORM = Exercise(sync_batch_norm, examine_sync_batch_norm)
EXERCISES = (SPLIT_STEP, FIND_STRAGGLER, SYNC_BATCH_NORM)
