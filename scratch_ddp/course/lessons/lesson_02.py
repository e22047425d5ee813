"""Lesson 02, inside all-reduce: a tree broadcast, a reduce and a ring, from send and receive.

The reference of `tree_broadcast` is the package's own function. The package's `reduce` and `ring_all_reduce` reuse the
memory that they receive into; the references here allocate it, as a learner does.
"""

import torch
import torch.distributed as dist

from scratch_ddp.collectives import send_recv, tree_broadcast
from scratch_ddp.course.exercise import Exercise
from scratch_ddp.course.trial import Trial
from scratch_ddp.course.wording import ranks, times
from scratch_ddp.instruments.traffic import Totals

FROM_MESSAGES = ("send", "recv")
# What a tensor may be besides one-dimensional and float32. Elements are smaller than a float32: gloo ends the process
# where a message is larger than the buffer that it arrives in, as it would be in a buffer that is float32 by default.
_KINDS = {
    "bfloat16, 2 × 3": torch.arange(6.0, dtype=torch.bfloat16).view(2, 3),
    "int8, a scalar": torch.tensor(5, dtype=torch.int8),
}


def reduce(tensor: torch.Tensor, dst: int = 0, group: dist.ProcessGroup | None = None) -> None:
    """Leave the sum of all ranks' tensors in `tensor` on rank dst. The others keep theirs.

    `tensor` is contiguous, of any shape and dtype. Messages stay in `group`, of one rank or more.
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

    `tensor` is contiguous, of any shape and dtype. Messages stay in `group`, of one rank or more.
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
    cases = [(f"src={trial.peer(src)}", src, torch.arange(5.0)) for src in range(trial.size)]
    cases += [(case, trial.size - 1, values) for case, values in _KINDS.items()]
    for case, src, values in cases:
        everyones = [(values + 10 * rank).to(trial.device) for rank in range(trial.size)]
        tensor = everyones[trial.rank].clone()
        trial.call(tensor, trial.peer(src), case=case, changes=[tensor])
        trial.value(tensor, everyones[src], "tensor")
        trial.agreement(tensor)
        trial.cost(
            messages=trial.size - 1,
            max_bytes_sent=rounds_of_a_tree(trial.size) * tensor.nbytes,
            depth=rounds_of_a_tree(trial.size),
            only=FROM_MESSAGES,
            note=_received_too_often,
        )


def _received_too_often(totals: Totals) -> str:
    received = [counts.messages_received for counts in totals.per_rank]
    return " ".join(f"{ranks([rank])} received {times(number)}." for rank, number in enumerate(received) if number > 1)


def examine_reduce(trial: Trial) -> None:
    """V on every destination, the others' tensors untouched; C: n-1 messages, at most S bytes from one rank."""
    everyones = [torch.arange(6.0) + 10**rank for rank in range(trial.size)]
    cases = [(f"dst={trial.peer(dst)}", dst, everyones) for dst in range(trial.size)]
    cases += [(kind, 0, [values + rank for rank in range(trial.size)]) for kind, values in _KINDS.items()]
    for case, dst, parts in cases:
        tensor = parts[trial.rank].clone().to(trial.device)
        trial.call(tensor, trial.peer(dst), case=case, changes=[tensor])
        if trial.rank == dst:
            trial.value(tensor, sum(parts).to(trial.device), "tensor")
        else:
            trial.untouched(tensor, parts[trial.rank].to(trial.device), "tensor")
        trial.cost(
            messages=trial.size - 1,
            max_bytes_sent=tensor.nbytes,
            depth=rounds_of_a_tree(trial.size),
            only=FROM_MESSAGES,
        )


def examine_ring_all_reduce(trial: Trial) -> None:
    """V for sizes that n divides or not, smaller than n, and 0; A; C: the ring's messages and bytes for each rank."""
    n, generator = trial.size, trial.generator()
    cases = {}
    for size in (3 * n, 3 * n + 1, n - 1, 0):
        cases[f"{size} elements"] = [
            torch.randn(size, generator=torch.Generator().manual_seed(rank)) for rank in range(n)
        ]
    cases |= {kind: [values + rank for rank in range(n)] for kind, values in _KINDS.items()}
    drawn = int(torch.randint(1, 40, (), generator=generator))
    cases[f"{drawn} elements drawn with seed {trial.seed}"] = list(torch.randn(n, drawn, generator=generator))
    for case, parts in cases.items():
        tensor = parts[trial.rank].clone().to(trial.device)
        result = trial.call(tensor, case=case, changes=[tensor])
        expected = (
            torch.stack([part.double() for part in parts]).sum(dim=0).to(tensor)
            if tensor.is_floating_point()
            else sum(parts)
        )
        tolerance = 1e-6 if tensor.dtype is torch.float32 else 0.0
        trial.value(tensor, expected, "tensor", tolerance)
        trial.criterion("value", "" if result is tensor else "is not `tensor` itself", "the result")
        trial.agreement(tensor)
        most = 2 * (n - 1) * -(-tensor.numel() // n) * tensor.element_size()
        trial.cost(max_messages=2 * (n - 1), max_bytes_sent=most, only=FROM_MESSAGES)


TREE_BROADCAST = Exercise(tree_broadcast, examine_tree_broadcast)
REDUCE = Exercise(reduce, examine_reduce)
RING_ALL_REDUCE = Exercise(
    ring_all_reduce,
    examine_ring_all_reduce,
    given="from scratch_ddp.collectives import send_recv",
)
EXERCISES = (TREE_BROADCAST, REDUCE, RING_ALL_REDUCE)
