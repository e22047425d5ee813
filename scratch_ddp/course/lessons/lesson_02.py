"""Lesson 02, inside all-reduce: a tree broadcast, a reduce and a ring, from send and receive.

The reference of `tree_broadcast` is the package's own function. The package's `reduce` and `ring_all_reduce` reuse the
memory that they receive into; the references here allocate it, as a learner does.
"""

import torch
import torch.distributed as dist

from scratch_ddp.collectives import send_recv, tree_broadcast
from scratch_ddp.course.exercise import Exercise
from scratch_ddp.course.guard import VALUES
from scratch_ddp.course.trial import Trial
from scratch_ddp.course.wording import ranks, times
from scratch_ddp.instruments.traffic import Totals

FROM_MESSAGES = ("send", "recv")
FLOAT = 4  # bytes


def reduce(tensor: torch.Tensor, dst: int = 0, group: dist.ProcessGroup | None = None) -> None:
    """Leave the sum of all ranks' tensors in `tensor` on rank dst. The others keep theirs.

    Cost: n-1 messages, at most one sent by a rank: S bytes. Depth ⌈log2 n⌉.
    Memory: 2·S at most beside `tensor`.
    """
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    root = dist.get_group_rank(group or dist.group.WORLD, dst)
    # In each round half of those that hold a sum send it on and are done.
    # What may the others write into?
    # answer: begin
    place = (rank - root) % n  # dst stands at place 0
    total = tensor
    reach = 1  # places that are multiples of reach hold the sum of the reach places from theirs on
    while reach < n and place % reach == 0:
        if place % (2 * reach) == reach:
            dist.send(total, group=group, group_dst=(rank - reach) % n)
        elif place + reach < n:
            arriving = torch.empty_like(tensor)
            dist.recv(arriving, group=group, group_src=(rank + reach) % n)
            total = arriving.add_(total)  # not into `tensor`: it belongs to the caller
        reach *= 2
    if rank == root:
        tensor.copy_(total)
    # answer: end


def ring_all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Sum `tensor` over the ranks, in place, and return it. All ranks get the same bits.

    Cost: 2(n-1) messages and 2(n-1)/n·S bytes sent by each rank, which no algorithm can do
    with fewer (Patarasuk and Yuan 2009). Depth 2(n-1). Memory: S/n beside `tensor`.
    """
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    # Cut the tensor into n chunks. First each chunk's sum is to be complete on one rank,
    # then it goes to all.
    # answer: begin
    chunks = tensor.view(-1).tensor_split(n)
    buffer = torch.empty_like(chunks[0])  # the first chunks are the largest
    left, right = (rank - 1) % n, (rank + 1) % n
    for step in range(n - 1):  # reduce-scatter: a sum travels round and takes up every rank's part
        mine = chunks[(rank - step - 1) % n]
        send_recv(chunks[(rank - step) % n], right, buffer[: mine.numel()], left, group)
        mine += buffer[: mine.numel()]
    for step in range(n - 1):  # all-gather: the complete chunk travels round and every rank keeps it
        send_recv(chunks[(rank + 1 - step) % n], right, chunks[(rank - step) % n], left, group)
    # answer: end
    return tensor


def rounds_of_a_tree(n: int) -> int:
    """⌈log2 n⌉: how often the number of ranks reached must double until they are n."""
    return (n - 1).bit_length()


def examine_tree_broadcast(trial: Trial) -> None:
    """V and A for every source; C: n-1 messages, depth ⌈log2 n⌉."""
    for src in range(trial.size):
        tensor = torch.arange(5.0, device=trial.device) + 10 * trial.rank
        trial.call(tensor, trial.peer(src), case=f"src={trial.peer(src)}", changes=[VALUES])
        trial.value(tensor, torch.arange(5.0, device=trial.device) + 10 * src, "tensor")
        trial.agreement(tensor)
        trial.cost(
            messages=trial.size - 1, depth=rounds_of_a_tree(trial.size), only=FROM_MESSAGES, note=_received_too_often
        )


def _received_too_often(totals: Totals) -> str:
    received = [counts.messages_received for counts in totals.per_rank]
    return " ".join(f"{ranks([rank])} received {times(number)}." for rank, number in enumerate(received) if number > 1)


def examine_reduce(trial: Trial) -> None:
    """V on every destination, the others' tensors untouched; C: n-1 messages, at most S bytes from one rank."""
    parts = [torch.arange(6.0, device=trial.device) + 10**rank for rank in range(trial.size)]
    for dst in range(trial.size):
        tensor = parts[trial.rank].clone()
        trial.call(tensor, trial.peer(dst), case=f"dst={trial.peer(dst)}", changes=[VALUES])
        if trial.rank == dst:
            trial.value(tensor, sum(parts), "tensor")
        else:
            trial.untouched(tensor, parts[trial.rank], "tensor")
        trial.cost(
            messages=trial.size - 1,
            max_bytes_sent=tensor.numel() * FLOAT,
            depth=rounds_of_a_tree(trial.size),
            only=FROM_MESSAGES,
        )


def examine_ring_all_reduce(trial: Trial) -> None:
    """V for sizes that n divides or not, smaller than n, and 0; A; C: the ring's messages and bytes for each rank."""
    n = trial.size
    for size in (3 * n, 3 * n + 1, n - 1, 0):
        parts = [torch.randn(size, generator=torch.Generator().manual_seed(rank)) for rank in range(n)]
        tensor = parts[trial.rank].clone().to(trial.device)
        result = trial.call(tensor, case=f"{size} elements", changes=[VALUES])
        expected = torch.stack(parts).double().sum(dim=0).float().to(trial.device)
        trial.value(tensor, expected, "tensor", tolerance=1e-6)
        trial.value(result, expected, "the result", tolerance=1e-6)
        trial.agreement(tensor)
        largest_chunk = -(-size // n)
        trial.cost(max_messages=2 * (n - 1), max_bytes_sent=2 * (n - 1) * largest_chunk * FLOAT, only=FROM_MESSAGES)


TREE_BROADCAST = Exercise(tree_broadcast, examine_tree_broadcast)
REDUCE = Exercise(reduce, examine_reduce)
RING_ALL_REDUCE = Exercise(
    ring_all_reduce,
    examine_ring_all_reduce,
    given="from scratch_ddp.collectives import send_recv",
)
EXERCISES = (TREE_BROADCAST, REDUCE, RING_ALL_REDUCE)
