"""Lesson 01, collectives: all-reduce in two steps, and an all-gather of tensors that differ in length."""

import torch
import torch.distributed as dist

from scratch_ddp.course.exercise import Exercise, WrongAnswer
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
        trial.call(tensor, root, case=f"root={root}")
        trial.value(tensor, sum(parts), "tensor")
        trial.agreement(tensor)
        trial.cost(calls={"reduce": 1, "broadcast": 1})


ALL_REDUCE_IN_TWO_STEPS = Exercise(
    all_reduce_in_two_steps,
    examine_all_reduce_in_two_steps,
    wrong=(
        WrongAnswer(
            "reads the sum on ranks that never got it",
            fails="value",
            says="Rank 1, root=0: tensor is",
            edits={"    dist.broadcast(tensor, root)\n": ""},
            also=("agreement",),
        ),
        WrongAnswer(
            "hands on rank 0's tensor, whoever holds the sum",
            fails="value",
            says="Rank 0, root=1: tensor is",
            edits={"dist.broadcast(tensor, root)": "dist.broadcast(tensor, 0)"},
        ),
        WrongAnswer(
            "reduces to one rank after the other",
            fails="cost",
            says="calls reduce 4 times, budget 1.",
            body="""
                mine = tensor.clone()
                for target in range(dist.get_world_size()):
                    part = mine.clone()
                    dist.reduce(part, target)
                    if dist.get_rank() == target:
                        tensor.copy_(part)
            """,
        ),
        WrongAnswer(
            "torch's own all-reduce",
            fails="cost",
            says="calls all_reduce once, budget 0.",
            body="dist.all_reduce(tensor)",
        ),
        WrongAnswer(
            "only the root calls reduce",
            fails="runs",
            says="did not come back",
            edits={"dist.reduce(tensor, root)": "if dist.get_rank() == root:\n        dist.reduce(tensor, root)"},
        ),
    ),
)


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


ALL_GATHER_UNEVEN = Exercise(
    all_gather_uneven,
    examine_all_gather_uneven,
    wrong=(
        WrongAnswer(
            "leaves the padding in",
            fails="value",
            says="Rank 0, lengths [1, 2, 3, 4]: the result at entry 0 has shape (4,), should have (1,).",
            edits={"pieces[rank][: int(lengths[rank])]": "pieces[rank]"},
        ),
        WrongAnswer(
            "a list of n times the same tensor",
            fails="value",
            says="Rank 0, lengths [1, 2, 3, 4]: the result at entry 0 is [1000], should be [1].",
            edits={
                "[tensor.new_empty(longest) for _ in range(world_size)]": "[tensor.new_empty(longest)] * world_size"
            },
        ),
        WrongAnswer(
            "cuts every piece to its own length",
            fails="value",
            says="Rank 0, lengths [1, 2, 3, 4]: the result at entry 1 has shape (1,), should have (2,).",
            edits={"[: int(lengths[rank])]": "[: len(tensor)]"},
            also=("agreement",),
        ),
        WrongAnswer(
            "one tensor in place of a list",
            fails="value",
            says="the result is a Tensor, should be a list",
            edits={
                "pieces = [pieces[rank]": "pieces = torch.cat([pieces[rank]",
                "])] for rank in range(world_size)]": "])] for rank in range(world_size)])",
            },
        ),
        WrongAnswer(
            "pickles the tensors: right, but many bytes",
            fails="cost",
            says="bytes from one rank, budget 72.",
            body="pieces = [None] * world_size\ndist.all_gather_object(pieces, tensor)",
        ),
    ),
)
EXERCISES = (ALL_REDUCE_IN_TWO_STEPS, ALL_GATHER_UNEVEN)
