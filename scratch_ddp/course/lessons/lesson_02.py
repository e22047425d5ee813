"""Lesson 02, inside all-reduce: a tree broadcast, a reduce and a ring, from send and receive.

The reference of `tree_broadcast` is the package's own function. The package's `reduce` and `ring_all_reduce` reuse the
memory that they receive into; the references here allocate it, as a learner does.
"""

from typing import Any

import torch
import torch.distributed as dist

from scratch_ddp.collectives import send_recv, tree_broadcast
from scratch_ddp.course.exercise import Exercise
from scratch_ddp.course.inputs.every_kind import parts_of_every_kind, total_of
from scratch_ddp.course.inputs.more_ranks import MoreRanks
from scratch_ddp.course.trial import Trial
from scratch_ddp.course.wording import ranks, times
from scratch_ddp.instruments.traffic import Totals

FROM_MESSAGES = ("send", "recv")
MORE = 5  # ranks: more than a lesson has
DOUBLE = "float64, 2 × 2"  # the kind of tensor whose memory is counted


def reduce(tensor: torch.Tensor, dst: int = 0, group: dist.ProcessGroup | None = None) -> None:
    """Leave the sum of all ranks' tensors in `tensor` on rank dst. The others keep theirs.

    `tensor` is contiguous, of any shape and any dtype of numbers, added as by torch's `+`.
    Messages stay in `group`, of one rank or more.
    Cost: n-1 messages, at most one sent by a rank: S bytes. Depth ⌈log2 n⌉.
    Memory: at most 2·S beside `tensor`.
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

    `tensor` is contiguous, of any shape and any dtype of numbers, added as by torch's `+`.
    Messages stay in `group`, of one rank or more.
    Cost: each rank sends 2(n-1) messages of at most ⌈S/n⌉ (whole elements), some may be empty.
    In every algorithm the busiest rank sends 2(n-1)/n·S or more (Patarasuk and Yuan 2009).
    Depth 2(n-1). Memory: at most 2·⌈S/n⌉ beside `tensor`.
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


def kinds_for(trial: Trial) -> dict[str, list[torch.Tensor]]:
    """Every kind of tensor; none elsewhere than on all ranks."""
    return parts_of_every_kind(trial.size) if trial.on_all_ranks else {}


def examine_tree_broadcast(trial: Trial) -> None:
    """V and A, every bit, for every source and kind of tensor; C: n-1 messages, depth ⌈log2 n⌉, also on more ranks."""
    n = trial.size
    vectors = vectors_of(n)
    cases = [(f"src={trial.peer(src)}", src, vectors) for src in range(n)]
    cases += [(kind, n - 1, parts) for kind, parts in kinds_for(trial).items()]
    for case, src, parts in cases:
        tensor = parts[trial.rank].clone().to(trial.device)
        trial.call(tensor, trial.peer(src), case=case, changes=[tensor])
        trial.value(tensor, parts[src].to(trial.device), "tensor", every_bit=True)
        trial.agreement(tensor)
        trial.cost(**budget_of_a_tree(n, rounds_of_a_tree(n) * tensor.nbytes), note=_received_too_often)
    if trial.size == 1:  # the last of the worlds
        parts, src = vectors_of(MORE), 1 + trial.seed % (MORE - 1)
        budget = budget_of_a_tree(MORE, rounds_of_a_tree(MORE) * parts[0].nbytes)
        examine_on_more_ranks(trial, parts, [parts[src]] * MORE, budget, src)


def vectors_of(n: int) -> list[torch.Tensor]:
    return [torch.arange(5.0) + 10 * rank for rank in range(n)]


def budget_of_a_tree(n: int, most: int) -> dict[str, Any]:
    return {"messages": n - 1, "max_bytes_sent": most, "depth": rounds_of_a_tree(n), "only": FROM_MESSAGES}


def examine_on_more_ranks(
    trial: Trial, parts: list[torch.Tensor], expected: list[torch.Tensor], budget: dict[str, Any], root: int | None
) -> None:
    """V and C where there are as many ranks as `parts`. They take turns in one process (`more_ranks`)."""
    ran = MoreRanks(parts, root)
    trial.place = f"if there were {len(parts)} ranks"
    trial.call(case="" if root is None else f"rank {root} at the root", using=ran)
    trial.criterion("value", ran.left_over.rstrip("."))
    for rank, tensor in enumerate(ran.tensors):
        trial.value(tensor, expected[rank], f"rank {rank}'s tensor", 1e-6)
    trial.cost(**budget, totals=ran.totals)


def _received_too_often(totals: Totals) -> str:
    received = [counts.messages_received for counts in totals.per_rank]
    return " ".join(f"{ranks([rank])} received {times(number)}." for rank, number in enumerate(received) if number > 1)


def examine_reduce(trial: Trial) -> None:
    """V for every destination and kind of tensor; the others' tensors untouched; C as for a tree; M: 2·S."""
    n = trial.size
    everyones = [torch.arange(6.0) + 10**rank for rank in range(n)]
    cases = [(f"dst={trial.peer(dst)}", dst, everyones) for dst in range(n)]
    cases += [(kind, 0, parts) for kind, parts in kinds_for(trial).items()]
    for case, dst, parts in cases:
        tensor = parts[trial.rank].clone().to(trial.device)
        if case == DOUBLE:
            trial.call_within(2 * tensor.numel(), tensor, trial.peer(dst), case=case, changes=[tensor])
        else:
            trial.call(tensor, trial.peer(dst), case=case, changes=[tensor])
        if trial.rank == dst:
            trial.value(tensor, total_of(parts).to(trial.device), "tensor")
        else:
            trial.untouched(tensor, parts[trial.rank].to(trial.device), "tensor")
        trial.cost(**budget_of_a_tree(n, tensor.nbytes))
    if trial.size == 1:  # the last of the worlds
        parts, dst = vectors_of(MORE), 1 + trial.seed % (MORE - 1)
        expected = [*parts[:dst], total_of(parts), *parts[dst + 1 :]]
        examine_on_more_ranks(trial, parts, expected, budget_of_a_tree(MORE, parts[0].nbytes), dst)


def examine_ring_all_reduce(trial: Trial) -> None:
    """V for all kinds of tensors, and sizes that n divides or not, smaller than n, and 0; A; C: the ring's; M."""
    n, generator = trial.size, trial.generator()
    drawn = int(torch.randint(1, 40, (), generator=generator))
    sizes = {f"{drawn} elements drawn with seed {trial.seed}": drawn}
    if trial.on_all_ranks:  # other sizes are among `kinds_for`
        sizes = {f"{3 * n + 1} elements": 3 * n + 1}
    cases = {case: list(torch.randn(n, size, generator=generator)) for case, size in sizes.items()}
    large = {"20,003 elements": list(torch.randn(n, 20_003, generator=generator))} if trial.on_all_ranks else {}
    for case, parts in (cases | kinds_for(trial) | large).items():
        tensor = parts[trial.rank].clone().to(trial.device)
        chunk = -(-tensor.numel() // n)
        if case == DOUBLE:
            result = trial.call_within(2 * chunk, tensor, case=case, changes=[tensor])
        else:
            result = trial.call(tensor, case=case, changes=[tensor])
        rounded = case in cases or case in large
        expected = total_of([part.double() for part in parts]).to(tensor) if rounded else total_of(parts)
        trial.value(tensor, expected.to(trial.device), "tensor", 1e-6 if rounded else 0.0)
        trial.criterion("value", "" if result is tensor else "is not `tensor` itself", "the result")
        trial.agreement(tensor)
        trial.cost(**budget_of_a_ring(n, chunk * tensor.element_size()))
    if trial.size == 1:  # the last of the worlds
        parts = list(torch.randn(MORE, 2 * MORE + 3, generator=generator))
        total = total_of([part.double() for part in parts]).float()
        examine_on_more_ranks(trial, parts, [total] * MORE, budget_of_a_ring(MORE, 3 * parts[0].element_size()), None)


def budget_of_a_ring(n: int, chunk: int) -> dict[str, Any]:
    """chunk: bytes of the largest."""
    rounds = 2 * (n - 1)
    return {"max_messages": rounds, "max_bytes_sent": rounds * chunk, "depth": rounds, "only": FROM_MESSAGES}


TREE_BROADCAST = Exercise(tree_broadcast, examine_tree_broadcast)
REDUCE = Exercise(reduce, examine_reduce)
RING_ALL_REDUCE = Exercise(
    ring_all_reduce,
    examine_ring_all_reduce,
    given="from scratch_ddp.collectives import send_recv",
)
EXERCISES = (TREE_BROADCAST, REDUCE, RING_ALL_REDUCE)
