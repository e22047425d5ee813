"""Lesson 01, collectives: all-reduce in two steps, and an all-gather of tensors that differ in length."""

import contextlib
import functools
import math
from collections.abc import Callable

import torch
import torch.distributed as dist

from scratch_ddp.course.exercise import Exercise
from scratch_ddp.course.inputs.every_kind import (
    INT16,
    default_float64,
    odd_numbers,
    parts_drawn,
    parts_of_every_kind,
    parts_of_further_dtypes,
    total_of,
)
from scratch_ddp.course.inputs.larger import Larger
from scratch_ddp.course.inputs.one_process import World, tried_in_worlds
from scratch_ddp.course.trial import Trial
from scratch_ddp.instruments.traffic import ring_bytes

FLOAT, INTEGER = 4, 8  # bytes
MANY = "more elements than fit into a MiB"
TWO_STEPS, TWICE = {"reduce": 1, "broadcast": 1}, {"all_gather": 2}


def all_reduce_in_two_steps(tensor, root=0):
    """Leave the sum of all ranks' tensors in `tensor` on every rank, by way of rank `root`.

    `tensor` is contiguous, of any shape; float16, bfloat16, float32, float64, uint8, int8, int32
    or int64. It may be a part of a larger tensor, whose other elements stay as they are.
    Cost: one dist.reduce to `root`, one dist.broadcast from it, each of as many bytes as `tensor`.
    """
    # Who holds the sum after the first step?
    # answer: begin
    dist.reduce(tensor, root)
    dist.broadcast(tensor, root)
    # answer: end


def examine_all_reduce_in_two_steps(trial: Trial) -> None:
    """V and A for every root, several dtypes and shapes; C: one reduce, one broadcast, their root and their bytes."""
    n = trial.size
    everyones = [torch.arange(4.0) + 10**rank for rank in range(n)]
    cases = {f"root={root}": (everyones, root) for root in range(0 if trial.on_all_ranks else n - 1, n)}
    if trial.on_all_ranks:
        kinds = parts_of_every_kind(n)
        cases |= {kind: (kinds[kind], n - 1) for kind in ("float32 with NaN, infinity and -0.0",)}
    cases["no root given"] = everyones, None
    larger = {case: Larger(parts[trial.rank].to(trial.device)) for case, (parts, _) in cases.items()}
    given = {case: (larger[case].inside, root) for case, (_, root) in cases.items()}
    named = {f"tensor ({case})": tensor for case, (tensor, _) in given.items()}
    called = trial.call_each(given, using=_with_root, beside=named, changes=list(named.values()))
    for (case, (parts, root)), _ in zip(cases.items(), called, strict=True):
        larger[case].judge(trial, total_of(parts).to(trial.device))
        trial.agreement(given[case][0])
        by_way_of = {call.peer for call in trial.calls if call.name in TWO_STEPS} - {root or 0}
        trial.criterion("root", f"goes by way of rank {min(by_way_of)}" if by_way_of else "")
        trial.cost(calls=TWO_STEPS, max_wire_bytes=_wire_bytes(parts, root or 0))
    if trial.on_all_ranks:
        trial.end_if_wrong()
        _examine_in_worlds(trial)


def _kinds(n: int, generator: torch.Generator) -> dict[str, list[torch.Tensor]]:
    """Of the dtypes that the exercise names."""
    kinds = parts_of_every_kind(n) | parts_of_further_dtypes(n) | parts_drawn(n, generator)
    return {kind: parts for kind, parts in kinds.items() if kind != INT16 and not parts[0].is_complex()}


def _examine_in_worlds(trial: Trial) -> None:
    """V and C for every kind of tensor, with 2 to 5 ranks, and for one kind with 1 and with 6 to 9."""
    n = 2 + (trial.seed + trial.rank) % 4  # so all ranks of the trial together try several
    cases = {}
    for place, (kind, parts) in enumerate(_kinds(n, trial.generator()).items()):
        root = (trial.seed // 7 + place) % n
        cases[f"{kind}, root={root}, seed {trial.seed}"] = parts, root
    cases["zeros on one rank that is not the root"] = [torch.arange(3.0) * (rank != 1) for rank in range(n)], 0
    cases[MANY] = [torch.full((2**20 + 3,), rank + 1, dtype=torch.uint8) for rank in range(2)], 1
    for more in (1, 6 + trial.seed % 4):
        cases[f"root={more - 1}"] = [torch.arange(3.0) + rank for rank in range(more)], more - 1
    larger: dict[str, list[Larger]] = {}

    def arguments(case: str) -> list[tuple]:
        parts, root = cases[case]
        larger[case] = [Larger(part.to(trial.device)) for part in parts]
        return [(each.inside, root) for each in larger[case]]

    for case, world in tried_in_worlds(trial, {case: functools.partial(arguments, case) for case in cases}):
        parts, root = cases[case]
        for rank, each in enumerate(larger[case]):
            each.judge(trial, total_of(parts).to(trial.device), f"{world.place} rank {rank}'s ")
        trial.criterion("root", world.other_roots(root), world.place)
        trial.criterion("cost", world.over_budget(TWO_STEPS, _wire_bytes(parts, root)), world.place)


def _wire_bytes(parts: list[torch.Tensor], root: int) -> int:
    """Of the rank that sends the most."""
    n, size = len(parts), parts[0].nbytes
    return max(sum(ring_bytes(name, size, n, rank, root) for name in TWO_STEPS) for rank in range(n))


def _with_root(answer: Callable, tensor: torch.Tensor, root: int | None) -> None:
    answer(tensor, **({} if root is None else {"root": root}))


ALL_REDUCE_IN_TWO_STEPS = Exercise(all_reduce_in_two_steps, examine_all_reduce_in_two_steps)


def all_gather_uneven(tensor):
    """Return a list with every rank's `tensor`, in the order of the ranks.

    All are one-dimensional and float32, of any lengths and values, perhaps not contiguous; torch's
    default dtype may be another one. Every bit is kept. `dist.all_gather` takes contiguous tensors
    of one size only.
    Cost: at most two dist.all_gather, of one int64, then of as many elements as the longest has.
    """
    world_size = dist.get_world_size()
    # Nobody knows the others' lengths yet.
    # answer: begin
    lengths = [torch.empty(1, dtype=torch.int64, device=tensor.device) for _ in range(world_size)]
    dist.all_gather(lengths, torch.tensor([len(tensor)], device=tensor.device))
    longest = int(max(lengths))
    padded = tensor.new_zeros(longest)
    padded[: len(tensor)] = tensor
    pieces = [tensor.new_empty(longest) for _ in range(world_size)]
    dist.all_gather(pieces, padded)
    pieces = [pieces[rank][: int(lengths[rank])] for rank in range(world_size)]
    # answer: end
    return pieces


def examine_all_gather_uneven(trial: Trial) -> None:
    """V for rising and falling lengths; A; the own tensor untouched; C: two all-gathers, no longer than needed."""
    n = trial.size
    rising, falling = [rank + 1 for rank in range(n)], [3 * (n - 1 - rank) for rank in range(n)]
    cases = {
        f"lengths {lengths}": [10.0**rank + torch.arange(length) for rank, length in enumerate(lengths)]
        for lengths in ((rising, falling) if trial.on_all_ranks else (falling,))
    }
    everyones = {case: [tensor.to(trial.device) for tensor in tensors] for case, tensors in cases.items()}
    given = {case: (tensors[trial.rank].clone(),) for case, tensors in everyones.items()}
    if not trial.on_all_ranks:
        given = {f"{case}, float64 is the default dtype": args for case, args in given.items()}
    with contextlib.nullcontext() if trial.on_all_ranks else default_float64():
        for tensors, pieces in zip(everyones.values(), trial.call_each(given), strict=True):
            trial.value(pieces, tensors, every_bit=True)
            trial.agreement(pieces)
            first = trial.calls[0].payload if trial.calls else INTEGER
            unit = "byte" if first == 1 else "bytes"
            trial.criterion("length", f"is sent in {first} {unit}, should be one int64" if first != INTEGER else "")
            trial.cost(calls=TWICE, max_wire_bytes=_wire_bytes_uneven(tensors))
    if trial.on_all_ranks:
        trial.end_if_wrong()
        _examine_lengths_in_worlds(trial)


def _examine_lengths_in_worlds(trial: Trial) -> None:
    """V, every bit, and C with 1 to 9 ranks, for tensors of any lengths, bits and strides."""
    generator, n, odd = trial.generator(), 2 + trial.seed % 5, odd_numbers()
    cases = {
        "no elements": [torch.empty(0)] * n,
        "zeros, NaN and infinity": [odd[: 5 - rank % 5] for rank in range(n)],
        "262,145 elements on rank 0": [torch.arange(float(rank or 2**18 + 1)) for rank in range(2)],
        "a NaN with bits of its own": [odd[5 - rank % 5 :] for rank in range(n)],
        "a part of a longer tensor": [torch.arange(9.0)[rank + 2 : 2 * rank + 3] for rank in range(n)],
        "every second element of a tensor": [torch.arange(8.0)[rank % 2 :: 2] for rank in range(n)],
        "one number, expanded": [torch.tensor([rank + 1.0]).expand(3 + rank) for rank in range(n)],
        "rank 1 alone has elements": [torch.arange(5.0 * (rank == 1)) for rank in range(n)],
        "all lengths are equal": [torch.arange(4.0) + rank for rank in range(n)],
        "one rank": [odd],
        "one element more on each rank": [torch.arange(500.0 + rank) for rank in range(n)],
        "each ends in other special values": [_ends_in(end, 1 + 2 * rank) for rank, end in enumerate(_ENDS)],
        "9 ranks": [torch.arange(rank * 2.0) - rank for rank in range(9)],
    }
    for number in range(6):
        lengths = ((8 * 8**number) ** torch.rand(1 + number, generator=generator)).int().tolist()
        tensors = [torch.randint(-(2**31), 2**31, (length,), generator=generator).int() for length in lengths]
        cases[f"lengths {lengths} and bits drawn with seed {trial.seed}"] = [
            each.view(torch.float32) for each in tensors
        ]
    everyones = {case: [tensor.to(trial.device) for tensor in tensors] for case, tensors in cases.items()}
    copies = {case: [tensor.clone() for tensor in tensors] for case, tensors in everyones.items()}
    makers = {case: functools.partial(_as_arguments, tensors) for case, tensors in everyones.items()}
    padding = 0.0
    for case, world in tried_in_worlds(trial, makers):
        for rank, pieces in enumerate(world.results):
            trial.value(pieces, copies[case], f"{world.place} rank {rank}'s result", every_bit=True)
            trial.untouched(everyones[case][rank], copies[case][rank], f"{world.place} rank {rank}'s tensor")
        trial.criterion("cost", world.over_budget(TWICE, _wire_bytes_uneven(copies[case])), world.place)
        padding = _padding(world, copies[case]) or padding
    marked = [_ends_in(padding, 1 + 2 * rank) for rank in range(4)]  # a value that might mark the end
    other = [-2.0 - tensor for tensor in marked]
    further = {
        f"values of {padding:g} at the end": [marked],
        "other numbers of the same lengths": [other, marked],  # two calls, and the first one's result is kept
    }
    makers = {case: functools.partial(_by_rank, calls) for case, calls in further.items()}
    for case, world in tried_in_worlds(trial, makers, using=_all_of):
        for rank, results in enumerate(world.results):
            for result, tensors in zip(results, further[case], strict=True):
                trial.value(result, tensors, f"{world.place} rank {rank}'s result", every_bit=True)


def _by_rank(calls: list[list[torch.Tensor]]) -> list[tuple[torch.Tensor, ...]]:
    return list(zip(*calls, strict=True))


def _all_of(answer: Callable, *tensors: torch.Tensor) -> list[list[torch.Tensor]]:
    return [answer(tensor) for tensor in tensors]


def _ends_in(value: float, length: int) -> torch.Tensor:
    return torch.cat([torch.arange(float(length)), torch.full((2,), value)])


def _padding(world: World, tensors: list[torch.Tensor]) -> float:
    """With what a rank has filled up what it has sent; 0.0 if with nothing else."""
    for gifts in world.meetings[1:2]:
        for rank, gift in gifts.items():
            if gift.tensors and gift.tensors[0].numel() > len(tensors[rank]):
                return float(gift.tensors[0].flatten()[len(tensors[rank])])
    return 0.0


_ENDS = (-math.inf, math.inf, math.nan, 0.0, -0.0, -1.0, torch.finfo(torch.float32).min, torch.finfo(torch.float32).max)


def _as_arguments(tensors: list[torch.Tensor]) -> list[tuple[torch.Tensor]]:
    return [(tensor,) for tensor in tensors]


def _wire_bytes_uneven(tensors: list[torch.Tensor]) -> int:
    return (len(tensors) - 1) * (INTEGER + FLOAT * max(map(len, tensors)))


ALL_GATHER_UNEVEN = Exercise(all_gather_uneven, examine_all_gather_uneven)
EXERCISES = (ALL_REDUCE_IN_TWO_STEPS, ALL_GATHER_UNEVEN)
