"""Lesson 01, collectives: all-reduce in two steps, and an all-gather of tensors that differ in length."""

import torch
import torch.distributed as dist

from scratch_ddp.course.compare import Words
from scratch_ddp.course.exercise import Exercise
from scratch_ddp.instruments.traffic import traffic


def all_reduce_in_two_steps(tensor, root=0):
    """Leave the sum of all ranks' tensors in `tensor` everywhere, by way of `root`.

    Cost: one dist.reduce to `root`, one dist.broadcast from it.
    """
    # Who holds the sum after the first step?
    dist.reduce(tensor, root)
    dist.broadcast(tensor, root)


def _roots(at):
    for root in (0, 1):
        yield f"root={root}", (torch.arange(4.0) + 10**at.rank, root)


def _by_way_of(answer, tensor, root):
    with traffic() as counted:
        answer(tensor, root)
    yield "value", "`tensor`", tensor
    calls = [call for event, call in counted.events if event == "start"]
    said = [call.name if call.peer is None else f"{call.name} at rank {call.peer}" for call in calls]
    yield "steps", "what it calls", Words(", then ".join(said))


def all_gather_uneven(tensor):
    """Return a list with every rank's `tensor`, in the order of the ranks.

    They are one-dimensional and differ in length; some may be empty. `dist.all_gather`
    takes tensors of one size only.
    Cost: two dist.all_gather, of an integer, then of as many elements as the longest
    has.
    """
    world_size = dist.get_world_size()
    # Nobody knows the others' lengths yet. How long is the longest?
    lengths = [torch.empty(1, dtype=torch.int64, device=tensor.device) for _ in range(world_size)]
    dist.all_gather(lengths, torch.tensor([len(tensor)], device=tensor.device))
    longest = int(max(lengths))
    padded = torch.nn.functional.pad(tensor, (0, longest - len(tensor)))
    pieces = [tensor.new_empty(longest) for _ in range(world_size)]
    dist.all_gather(pieces, padded)
    pieces = [pieces[rank][: int(lengths[rank])] for rank in range(world_size)]
    # end of the answer
    return pieces


def _lengths(at):
    yield "rank r has r + 1 elements", (torch.arange(1.0, at.rank + 2),)
    yield "the last rank has none", (torch.full((3 * (at.n - 1 - at.rank),), at.rank + 0.5),)
    yield "integers, with zeros at the end", (torch.tensor([1, 0, 0])[: at.rank + 1],)


EXERCISES = (Exercise(all_reduce_in_two_steps, _roots, use=_by_way_of), Exercise(all_gather_uneven, _lengths))
