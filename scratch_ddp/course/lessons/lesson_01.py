"""Lesson 01, collectives: all-reduce in two steps, and an all-gather of tensors that differ in length."""

import functools
from collections.abc import Callable

import torch
import torch.distributed as dist

from scratch_ddp.course.exercise import Exercise
from scratch_ddp.course.inputs.every_kind import INT16, parts_of_every_kind, parts_of_further_dtypes, total_of
from scratch_ddp.course.trial import Trial
from scratch_ddp.instruments.traffic import ring_bytes

FLOAT, INTEGER = 4, 8  # bytes


def all_reduce_in_two_steps(tensor, root=0):
    """Leave the sum of all ranks' tensors in `tensor` on every rank, by way of rank `root`.

    `tensor` is contiguous, of any shape; float16, bfloat16, float32, float64, uint8, int8, int32
    or int64. It may be a part of a larger tensor, whose other elements stay as they are.
    Cost: one dist.reduce to `root` and one dist.broadcast from it, of the tensor's own bytes.
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
    cases = [(f"root={root}", root, everyones) for root in range(n)]
    kinds = parts_of_every_kind(n) | parts_of_further_dtypes(n)
    kinds = {kind: parts for kind, parts in kinds.items() if kind != INT16 and not parts[0].is_complex()}
    cases += [(kind, n - 1, parts) for kind, parts in kinds.items() if trial.on_all_ranks]
    cases.append(("no root given", 0, everyones))
    for case, root, parts in cases:
        mine, expected = parts[trial.rank].to(trial.device), total_of(parts).to(trial.device)
        whole = torch.cat([mine.flatten()] * 3)
        before, inside, behind = whole.view(3, mine.numel()).unbind()
        tensor = inside.view(mine.shape)
        named = {} if case == "no root given" else {"root": root}
        trial.call(tensor, case=case, changes=[tensor], using=functools.partial(_with_names, named))
        trial.value(tensor, expected, "tensor", every_bit=not expected.isnan().any())
        for beside in (before, behind):
            trial.untouched(beside, mine.flatten(), "what lies beside `tensor` in a larger one")
        trial.agreement(tensor)
        by_way_of = {call.peer for call in trial.calls if call.name in ("reduce", "broadcast")}
        trial.criterion("root", f"goes by way of rank {min(by_way_of - {root})}" if by_way_of - {root} else "")
        wire = max(
            sum(ring_bytes(name, tensor.nbytes, n, rank, root) for name in ("reduce", "broadcast")) for rank in range(n)
        )
        trial.cost(calls={"reduce": 1, "broadcast": 1}, max_wire_bytes=wire)


def _with_names(named: dict[str, int], answer: Callable, tensor: torch.Tensor) -> None:
    answer(tensor, **named)


ALL_REDUCE_IN_TWO_STEPS = Exercise(all_reduce_in_two_steps, examine_all_reduce_in_two_steps)


def all_gather_uneven(tensor):
    """Return a list with every rank's `tensor`, in the order of the ranks.

    They are one-dimensional, float32, of any lengths and values, and may be strided; every bit
    is kept. `dist.all_gather` takes contiguous tensors of one size only.
    Cost: two dist.all_gather, of one int64, then of as many elements as the longest tensor has.
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
    """V for rising, falling and no lengths; A; the own tensor untouched; C: two all-gathers, no longer than needed."""
    n = trial.size
    generator = trial.generator()
    drawn = [int(length) for length in torch.randint(0, 9, (n,), generator=generator)]
    cases = [
        (f"lengths {lengths}", [10.0**rank + torch.arange(length) for rank, length in enumerate(lengths)])
        for lengths in ([rank + 1 for rank in range(n)], [3 * (n - 1 - rank) for rank in range(n)], [0] * n)
    ]
    odd = torch.tensor([0.0, torch.nan, -0.0, torch.inf, 0.0, torch.nan])
    odd[-1:].view(torch.int32).fill_(0x7F800001)  # a NaN that every operation of arithmetic changes
    cases.append(("zeros, NaN and infinity", [odd[: 5 - rank % 5].clone() for rank in range(n)]))
    cases.append(("a NaN with bits of its own", [odd[5 - rank % 5 :].clone() for rank in range(n)]))
    cases.append(("a part of a longer tensor", [torch.arange(9.0)[rank + 2 : 2 * rank + 3] for rank in range(n)]))
    cases.append(("70,001 elements on rank 0", [torch.arange(float(rank or 70_001)) for rank in range(n)]))
    cases.append(("every second element of a tensor", [torch.arange(8.0)[rank % 2 :: 2] for rank in range(n)]))
    cases.append((f"drawn with seed {trial.seed}", [torch.randn(length, generator=generator) for length in drawn]))
    for case, tensors in cases if trial.on_all_ranks else cases[1::4]:
        tensors = [tensor.to(trial.device) for tensor in tensors]
        lengths = [len(tensor) for tensor in tensors]
        pieces = trial.call(tensors[trial.rank], case=case)
        trial.value(pieces, tensors, every_bit=True)
        trial.agreement(pieces)
        first = trial.calls[0].payload if trial.calls else INTEGER
        trial.criterion("length", f"is sent in {first} bytes, should be one int64" if first != INTEGER else "")
        trial.cost(calls={"all_gather": 2}, max_wire_bytes=(n - 1) * (INTEGER + FLOAT * max(lengths)))


ALL_GATHER_UNEVEN = Exercise(all_gather_uneven, examine_all_gather_uneven)
EXERCISES = (ALL_REDUCE_IN_TWO_STEPS, ALL_GATHER_UNEVEN)
