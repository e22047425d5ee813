"""Lesson 01, collectives: all-reduce in two steps, and an all-gather of tensors that differ in length."""

import torch
import torch.distributed as dist

from scratch_ddp.course.exercise import Exercise
from scratch_ddp.course.guard import VALUES
from scratch_ddp.course.trial import Trial

FLOAT, INTEGER = 4, 8  # bytes


def all_reduce_in_two_steps(tensor, root=0):
    """Leave the sum of all ranks' tensors in `tensor` on every rank, by way of rank `root`.

    Cost: one dist.reduce and one dist.broadcast.
    """
    # Who holds the sum after the first step?
    # answer: begin
    dist.reduce(tensor, root)
    dist.broadcast(tensor, root)
    # answer: end


def examine_all_reduce_in_two_steps(trial: Trial) -> None:
    """V and A for every root; C: one reduce, one broadcast."""
    for root in range(trial.size):
        parts = [torch.arange(4.0, device=trial.device) + 10**rank for rank in range(trial.size)]
        tensor = parts[trial.rank].clone()
        trial.call(tensor, root, case=f"root={root}", changes=[VALUES])
        trial.value(tensor, sum(parts), "tensor")
        trial.agreement(tensor)
        trial.cost(calls={"reduce": 1, "broadcast": 1})


ALL_REDUCE_IN_TWO_STEPS = Exercise(all_reduce_in_two_steps, examine_all_reduce_in_two_steps)


def all_gather_uneven(tensor):
    """Return a list with every rank's `tensor`, in the order of the ranks.

    They are one-dimensional, float32, of any lengths; `dist.all_gather` takes tensors of one
    size only.
    Cost: two dist.all_gather, of one int64 and of as many elements as the longest tensor has.
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
    for lengths in ([rank + 1 for rank in range(n)], [3 * (n - 1 - rank) for rank in range(n)], [0] * n):
        tensors = [10.0**rank + torch.arange(length, device=trial.device) for rank, length in enumerate(lengths)]
        mine = tensors[trial.rank].clone()
        pieces = trial.call(mine, case=f"lengths {lengths}")
        trial.value(pieces, tensors)
        trial.untouched(mine, tensors[trial.rank], "tensor")
        trial.agreement(pieces)
        trial.cost(calls={"all_gather": 2}, max_wire_bytes=(n - 1) * (INTEGER + FLOAT * max(lengths)))


ALL_GATHER_UNEVEN = Exercise(all_gather_uneven, examine_all_gather_uneven)
EXERCISES = (ALL_REDUCE_IN_TWO_STEPS, ALL_GATHER_UNEVEN)
