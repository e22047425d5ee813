"""Lesson 02, inside all-reduce: a tree broadcast, a reduce and a ring, from send and receive.

The reference of `tree_broadcast` is the package's own function. The package's `reduce` and `ring_all_reduce` reuse the
memory that they receive into; the references here allocate it, as a learner does.
"""

import functools
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from scratch_ddp.collectives import send_recv, tree_broadcast
from scratch_ddp.course.exercise import Exercise
from scratch_ddp.course.inputs.every_kind import (
    INT16,
    odd_numbers,
    parts_drawn,
    parts_of_every_kind,
    parts_of_further_dtypes,
    total_of,
)
from scratch_ddp.course.inputs.larger import Larger
from scratch_ddp.course.inputs.more_ranks import MoreRanks
from scratch_ddp.course.inputs.one_process import tried_in_worlds
from scratch_ddp.course.trial import Trial
from scratch_ddp.course.wording import ranks, times
from scratch_ddp.instruments.traffic import Totals

FROM_MESSAGES = ("send", "recv")
LARGEST = 17  # ranks of a world: more than four rounds of a tree reach
# Elements of the tensor whose memory is counted, enough to see what is kept outside of torch; in the smallest float.
COUNTED, SMALLEST = 1201, torch.float16
COUNTED_CASE = f"{COUNTED:,} elements of float16"
BOOL = "bool"
LAST = INT16, BOOL  # torch's collectives refuse the one, and many operations the other
DRAWN = 4  # how many tensors of drawn size a ring sums
NO_ROOT = "without a root, which is rank 0 then"
RING_KINDS = ("float32 with NaN, infinity and -0.0",)


def reduce(tensor: torch.Tensor, dst: int = 0, group: dist.ProcessGroup | None = None) -> None:
    """Leave the sum of all ranks' tensors in `tensor` on rank dst. The others keep theirs.

    `tensor` is contiguous, of any shape and numeric dtype; sums are those of torch's `+`.
    Messages stay in `group`, which may have a single rank.
    Cost: n-1 messages, at most one sent by a rank: S bytes. Depth ⌈log2 n⌉.
    Memory: at most 2·S in addition to `tensor`.
    """
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    root = dist.get_group_rank(group or dist.group.WORLD, dst)
    # In each round half of those that hold a sum send it on and are done.
    # Where does a rank that receives put what arrives?
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

    `tensor` is contiguous, of any shape and numeric dtype; sums are those of torch's `+`.
    Messages stay in `group`, which may have a single rank.
    Cost: each rank sends 2(n-1) messages of at most ⌈elements/n⌉ elements each, some empty.
    In every algorithm the busiest rank sends 2·S·(n-1)/n or more (Patarasuk and Yuan 2009).
    Depth 2(n-1). Memory: at most 2·⌈elements/n⌉ elements in addition to `tensor`.
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
    if not trial.on_all_ranks:
        return {}
    return parts_of_every_kind(trial.size) | parts_of_further_dtypes(trial.size)


def has_no_nan(expected: torch.Tensor) -> bool:
    """Then its bits are known: which NaN a sum gives depends on the order."""
    return not expected.isnan().any()


def examine_tree_broadcast(trial: Trial) -> None:
    """V and A, every bit, for every source and kind of tensor; C: n-1 messages, depth ⌈log2 n⌉, also on more ranks."""
    n = trial.size
    vectors = vectors_of(n)
    cases = [(f"src={trial.peer(src)}", src, vectors) for src in range(n)]
    cases += [(NO_ROOT, 0, vectors)] * trial.on_all_ranks
    boolean = [torch.tensor([rank % 2 == 0, True]) for rank in range(n)]
    kinds = kinds_for(trial) | {
        "a NaN with bits of its own": [odd_numbers()[5:] if rank == n - 1 else torch.zeros(1) for rank in range(n)],
        "float16 with infinity": [torch.tensor([rank + 1.0, -rank]).half() / (n - 1 - rank) for rank in range(n)],
        BOOL: boolean,
    }
    cases += [(kind, n - 1, parts) for kind, parts in kinds.items()]
    everyones, sources = {case: parts for case, _, parts in cases}, {case: src for case, src, _ in cases}
    roots = {case: (trial.peer(src),) for case, src in sources.items() if case != NO_ROOT}
    for case, tensor, _ in called_with(trial, everyones, roots):
        trial.value(tensor, everyones[case][sources[case]].to(trial.device), "tensor", every_bit=True)
        trial.agreement(tensor)
        trial.cost(**budget_of_a_tree(n, rounds_of_a_tree(n) * tensor.nbytes), note=_received_too_often)
    for more in more_ranks(trial):
        parts, src = drawn_vectors(trial, more), 1 + trial.seed % (more - 1)
        budget = budget_of_a_tree(more, rounds_of_a_tree(more) * parts[0].nbytes)
        examine_on_more_ranks(trial, parts, [parts[src]] * more, budget, src)


def called_with(
    trial: Trial, everyones: Mapping[str, list[torch.Tensor]], further: Mapping[str, tuple] | None = None
) -> Iterator[tuple[str, torch.Tensor, Any]]:
    """Call the answer with this rank's tensor of each case and what else it is given. Yields case, tensor, result.

    The tensors are parts of larger ones. Those of LAST come last: first it is said what else is wrong.
    """
    larger = {case: Larger(parts[trial.rank].to(trial.device)) for case, parts in everyones.items()}
    tensors = {case: each.inside for case, each in larger.items()}
    for cases in ([case for case in tensors if case not in LAST], [case for case in tensors if case in LAST]):
        given = {case: (tensors[case], *(further or {}).get(case, ())) for case in cases}
        results = trial.call_each(given, changes=list(tensors.values())) if cases else ()
        for case, result in zip(cases, results, strict=True):
            larger[case].judge_beside(trial)
            yield case, tensors[case], result
        trial.end_if_wrong()


def more_ranks(trial: Trial) -> list[int]:
    """The numbers of ranks to try in the last of the worlds: a few, as many as there are, and many.

    A group of as many as there are is not the default group. The most is now and then a power of two.
    """
    return sorted({2, 5, 7, dist.get_world_size(), LARGEST - (trial.seed % 3 == 2)}) if trial.size == 1 else []


def drawn_vectors(trial: Trial, n: int) -> list[torch.Tensor]:
    """Whole numbers, whose sums are exact; of any size, and on two ranks so many that an answer may cut them."""
    if n == 2:
        return [torch.full((2**20 + 3,), rank + 1, dtype=torch.uint8) for rank in range(n)]
    generator = torch.Generator().manual_seed(trial.seed + n)
    size = int(1000 ** torch.rand((), generator=generator))
    return list(torch.randint(-1000, 1000, (n, size), generator=generator).float())


def vectors_of(n: int) -> list[torch.Tensor]:
    return [torch.arange(5.0) + 10 * rank for rank in range(n)]


def budget_of_a_tree(n: int, most: int) -> dict[str, Any]:
    return {"messages": n - 1, "max_bytes_sent": most, "depth": rounds_of_a_tree(n), "only": FROM_MESSAGES}


def examine_on_more_ranks(
    trial: Trial, parts: list[torch.Tensor], expected: list[torch.Tensor], budget: dict[str, Any], root: int | None
) -> MoreRanks:
    """V and C where there are as many ranks as `parts`. They take turns in one process (`more_ranks`)."""
    ran = MoreRanks(parts, root)
    trial.place = f"if there were {len(parts)} ranks"
    trial.call(case="" if root is None else f"rank {root} at the root", using=ran)
    trial.criterion("value", ran.left_over.rstrip("."))
    trial.criterion("runs", ran.swallowed, "if a connection broke:")
    for rank, tensor in enumerate(ran.tensors):
        trial.value(tensor, expected[rank], f"rank {rank}'s tensor", 1e-6)
    trial.cost(**budget, totals=ran.totals)
    return ran


def too_large(payload: int, chunk: int) -> str:
    return f"a message has {payload:,} bytes, should have {chunk:,} at most" if payload > chunk else ""


def _received_too_often(totals: Totals) -> str:
    received = [counts.messages_received for counts in totals.per_rank]
    return " ".join(f"{ranks([rank])} received {times(number)}." for rank, number in enumerate(received) if number > 1)


def examine_reduce(trial: Trial) -> None:
    """V for every destination and kind of tensor; the others' tensors untouched; C as for a tree; M: 2·S."""
    n = trial.size
    everyones = [torch.arange(6.0) + 10**rank for rank in range(n)]
    cases = [(f"dst={trial.peer(dst)}", dst, everyones) for dst in range(n)]
    cases += [(NO_ROOT, 0, everyones)] * trial.on_all_ranks
    cases += [(kind, 0, parts) for kind, parts in kinds_for(trial).items()]
    everyones, roots = {case: parts for case, _, parts in cases}, {case: dst for case, dst, _ in cases}
    peers = {case: (trial.peer(dst),) for case, dst in roots.items() if case != NO_ROOT}
    for case, tensor, _ in called_with(trial, everyones, peers):
        if trial.rank == roots[case]:
            total = total_of(everyones[case])
            trial.value(tensor, total.to(trial.device), "tensor", every_bit=has_no_nan(total))
        else:
            trial.untouched(tensor, everyones[case][trial.rank].to(trial.device), "tensor")
        trial.cost(**budget_of_a_tree(n, tensor.nbytes))
    if trial.on_all_ranks:
        tensor = torch.zeros(COUNTED, dtype=SMALLEST, device=trial.device)
        trial.call_within(2 * COUNTED, tensor, 0, case=COUNTED_CASE, changes=[tensor], unit=SMALLEST)
    for more in more_ranks(trial):
        parts, dst = drawn_vectors(trial, more), 1 + trial.seed % (more - 1)
        expected = [*parts[:dst], total_of(parts), *parts[dst + 1 :]]
        ran = examine_on_more_ranks(trial, parts, expected, budget_of_a_tree(more, parts[0].nbytes), dst)
        kept = f"holds {ran.buffers} tensors that it has received into, budget 2"
        trial.criterion("memory", kept if ran.buffers > 2 else "")


def examine_ring_all_reduce(trial: Trial) -> None:
    """V for all kinds of tensors, and sizes that n divides or not, smaller than n, and 0; A; C: the ring's; M."""
    n, generator = trial.size, trial.generator()
    drawn = int(torch.randint(1, 40, (), generator=generator))
    sizes = {f"{drawn} elements drawn with seed {trial.seed}": drawn}
    if trial.on_all_ranks:  # other sizes are among `kinds_for`
        sizes = {f"{4 * n - 1} elements": 4 * n - 1}
    cases = {case: list(torch.randn(n, size, generator=generator)) for case, size in sizes.items()}
    cases["1 element, with a sum that depends on the order"] = [
        torch.tensor([1.0 if rank == 0 else 2.0**-24]) for rank in range(n)
    ]
    kinds = kinds_for(trial)
    everyones = cases | {kind: kinds[kind] for kind in RING_KINDS if kind in kinds}
    for case, tensor, result in called_with(trial, everyones):
        parts, chunk = everyones[case], -(-tensor.numel() // n)
        rounded = case in cases
        expected = total_of([part.double() for part in parts]).to(tensor) if rounded else total_of(parts)
        every_bit = not rounded and has_no_nan(expected)
        trial.value(tensor, expected.to(trial.device), "tensor", 1e-6 if rounded else 0.0, every_bit)
        trial.criterion("value", "" if result is tensor else "is not `tensor` itself", "the result")
        trial.agreement(tensor)
        trial.cost(**budget_of_a_ring(n, chunk * tensor.element_size()))
        largest = max((call.payload for call in trial.calls), default=0)
        trial.criterion("chunks", too_large(largest, chunk * tensor.element_size()))
    if trial.on_all_ranks:
        _examine_ring_in_worlds(trial)
        tensor = torch.zeros(COUNTED, dtype=SMALLEST, device=trial.device)
        trial.call_within(2 * -(-COUNTED // n), tensor, case=COUNTED_CASE, changes=[tensor], unit=SMALLEST)
    for more in sorted({2, dist.get_world_size(), 5 + trial.seed % 2}) if trial.size == 1 else ():  # and how deep it is
        parts = drawn_vectors(trial, more)
        if 2 < more == dist.get_world_size():  # they divide the size, which some take for a cue to do otherwise
            parts = [torch.arange(4.0 * more) + rank for rank in range(more)]
        total, chunk = total_of(parts), -(-parts[0].numel() // more) * parts[0].element_size()
        ran = examine_on_more_ranks(trial, parts, [total] * more, budget_of_a_ring(more, chunk), None)
        trial.criterion("chunks", too_large(ran.largest, chunk))
        held = f"holds {ran.room:,} bytes that it has received into beside `tensor`, budget {2 * chunk:,}"
        trial.criterion("memory", held if ran.room > 2 * chunk else "")
        for rank, tensor in enumerate(ran.tensors):
            other = "" if torch.equal(tensor, ran.tensors[0]) else "has other bits than rank 0's"
            trial.criterion("value", other, f"rank {rank}'s tensor")


def _examine_ring_in_worlds(trial: Trial) -> None:
    """V and C with 2 to 6 ranks, for the kinds of tensors that are not among `RING_KINDS`, and drawn sizes.

    And with 7 to 9 ranks.
    """
    n, generator = 2 + (trial.seed + trial.rank) % 5, trial.generator()  # the ranks together try several
    kinds = parts_of_every_kind(n) | parts_of_further_dtypes(n)
    kinds = {kind: parts for kind, parts in kinds.items() if kind not in RING_KINDS}
    kinds |= itertools.islice(parts_drawn(n, generator, 5000).items(), DRAWN)
    kinds[f"2 × {n} elements"] = list(torch.arange(2.0 * n * n).view(n, 2, n))
    kinds["float64, an element more than ranks"] = list(torch.ones(7 + trial.seed % 3, 8 + trial.seed % 3).double())
    copies = {kind: [part.to(trial.device) for part in parts] for kind, parts in kinds.items()}
    makers = {kind: functools.partial(_as_arguments, parts) for kind, parts in copies.items()}
    for kind, world in tried_in_worlds(trial, makers):
        total = total_of(kinds[kind])
        for rank, (tensor,) in enumerate(world.given):
            what = f"{world.place} rank {rank}'s tensor"
            trial.value(tensor, total.to(trial.device), what, every_bit=has_no_nan(total))
            wrong = "" if world.results[rank] is tensor else "is not `tensor` itself"
            trial.criterion("value", wrong, f"{world.place} rank {rank}'s result")
        size = len(kinds[kind])
        chunk = -(-total.numel() // size) * total.element_size()
        trial.criterion("cost", world.too_many_messages(2 * (size - 1), chunk), world.place)


def _as_arguments(parts: list[torch.Tensor]) -> list[tuple[torch.Tensor]]:
    return [(part.clone(),) for part in parts]


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
