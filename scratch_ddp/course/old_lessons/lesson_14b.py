"""Lesson 14b, context and experts: a shift that gradients travel back through, and rows that go to chosen ranks."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from scratch_ddp.course.exercise import Exercise
from scratch_ddp.course.inputs.every_kind import WIDE, parts_of_every_kind
from scratch_ddp.course.trial import Trial

_INTEGER = 8  # bytes
Named = dict[str, torch.Tensor]


def shift(tensor, group=None):
    """Return the left neighbour's tensor: rank r of `group` gets that of rank r - 1, rank 0 the last
    rank's. A group of one rank keeps its own, as it is or as a copy.

    Gradients travel back: in backward each rank gets the gradient of what it has handed on, from
    its right neighbour. `tensor` has any dtype, shape and strides. Its dtype, its shape and whether
    it needs a gradient are the same on all ranks. Tensors and gradients stay as they are, and so do
    results when `shift` is called again.
    Cost: one message from each rank in forward and one in backward; none in a group of one rank.
    """
    # Autograd does not see what dist.send takes away. Who has the gradient in backward?
    # answer: begin
    rank, n = dist.get_rank(group), dist.get_world_size(group)

    def hand_on(mine, step):
        if n == 1:
            return mine.clone()  # a rank can't send to itself
        mine = mine.contiguous()
        arriving = torch.empty_like(mine)
        sending = dist.isend(mine, group=group, group_dst=(rank + step) % n)
        dist.recv(arriving, group=group, group_src=(rank - step) % n)
        sending.wait()
        return arriving

    class Shift(torch.autograd.Function):
        @staticmethod
        def forward(ctx, mine):
            return hand_on(mine, 1)

        @staticmethod
        def backward(ctx, gradient):
            return hand_on(gradient, -1)

    return Shift.apply(tensor)
    # answer: end


def examine_shift(trial: Trial) -> None:
    """V and C of results and gradients: of one tensor, of tensors of every kind, after two shifts."""
    n, rank = trial.size, trial.rank
    six = [_six_numbers(trial, each) for each in range(n)]
    _examine_both_ways(trial, "one tensor", [{"6 numbers": each} for each in six])
    trial.end_if_wrong()
    _examine_both_ways(trial, "tensors of every kind", _of_every_kind(n, trial.device))
    tensor, case = six[rank].clone().requires_grad_(), "shifted twice, the gradient of the sum"
    gradient = trial.call(tensor, case=case, using=_gradient_of_two_shifts)
    trial.value(gradient, torch.ones_like(tensor), "the gradient")
    with torch.no_grad():
        result = trial.call(six[rank].clone(), case="without gradients")
    trial.value(result, six[rank - 1])


def _examine_both_ways(trial: Trial, case: str, everyones: list[Named]) -> None:
    """All tensors are shifted before any gradient comes back: a result must outlive the next of its shape."""
    rank, right = trial.rank, (trial.rank + 1) % trial.size
    tensors = {kind: tensor.detach() for kind, tensor in everyones[rank].items()}
    learning = {kind: each.requires_grad_() for kind, each in tensors.items() if each.is_floating_point()}
    results = trial.call(tensors, case=case, using=_of_each)
    for kind in tensors:
        trial.value(results[kind], everyones[rank - 1][kind], f"the result for {kind}", every_bit=True)
    _cost(trial, len(tensors))
    weights = [{kind: -each[kind] for kind in learning} for each in everyones]
    known = {"results": results, "tensors": learning, "gradients": weights[rank]}
    gradients = trial.call(case=f"{case}, backward", beside=[known], using=lambda _: _gradients(**known))
    for kind in learning:
        trial.value(gradients[kind], weights[right][kind].clone(), f"the gradient for {kind}", every_bit=True)
    _cost(trial, len(learning))


def _six_numbers(trial: Trial, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * trial.seed + rank)
    return torch.randint(1, 100, (6,), generator=generator).double().to(trial.device)


def _of_every_kind(n: int, device: torch.device) -> list[Named]:
    """By rank: tensors of every dtype and of every kind of strides, some twice, with other values."""
    kinds = parts_of_every_kind(n) | {
        "a transposed matrix": [torch.arange(6.0).view(2, 3).t() + rank for rank in range(n)],
        "every second column": [(torch.arange(12.0).view(2, 6) + rank)[:, ::2] for rank in range(n)],
        "one number, expanded": [torch.tensor(rank + 0.5).expand(2, 2) for rank in range(n)],
        "two rows of many columns": [torch.arange(2.0 * WIDE).view(2, WIDE) + rank for rank in range(n)],
        "bfloat16 without dimensions": [torch.tensor(rank + 0.5, dtype=torch.bfloat16) for rank in range(n)],
    }
    for kind in ("float64, 2 × 2", "a transposed matrix"):
        kinds[f"another {kind}"] = [-part for part in kinds[kind]]
    return [{kind: parts[rank].to(device) for kind, parts in kinds.items()} for rank in range(n)]


def _of_each(answer: Callable, tensors: Named) -> dict[str, Any]:
    return {kind: answer(tensor) for kind, tensor in tensors.items()}


def _gradients(results: dict[str, Any], tensors: Named, gradients: Named) -> dict[str, torch.Tensor | None]:
    """Of each tensor, given those of the results; None where a result does not depend on it."""
    return {kind: _gradient(results[kind], tensor, gradients[kind]) for kind, tensor in tensors.items()}


def _gradient_of_two_shifts(answer: Callable, tensor: torch.Tensor) -> torch.Tensor | None:
    result = answer(answer(tensor))
    return _gradient(result, tensor, torch.ones((), device=tensor.device).to(tensor.dtype).expand(tensor.shape))


def _gradient(result: Any, tensor: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor | None:
    if not isinstance(result, torch.Tensor) or not result.requires_grad:
        return None
    return torch.autograd.grad(result, tensor, gradient, allow_unused=True)[0]


def _cost(trial: Trial, shifts: int) -> None:
    messages = shifts if trial.size > 1 else 0
    trial.cost(messages=messages * trial.size, max_messages=messages, only=("send", "recv"))


def send_rows(rows, counts, group=None):
    """Send the first counts[0] rows to rank 0 of `group`, the next counts[1] to rank 1, and so on.

    Return what arrives: rank 0's rows first, then rank 1's.
    `rows`: (sum(counts), columns), of any dtype and strides; dtype and columns are the same on all
    ranks. `counts`: a list of ints, one for each rank of `group`; each may be 0. Both stay as they
    are. Gradients need not flow back.
    Cost: two all-to-alls, of one int64 for each rank and of the rows.
    """
    # dist.all_to_all_single needs to know how many rows come. Who knows it?
    # answer: begin
    leaving = torch.tensor(counts, device=rows.device)
    arriving = torch.empty_like(leaving)
    dist.all_to_all_single(arriving, leaving, group=group)
    received = arriving.tolist()
    result = rows.new_empty(sum(received), rows.shape[1])
    dist.all_to_all_single(result, rows.contiguous(), received, counts, group=group)
    return result
    # answer: end


def examine_send_rows(trial: Trial) -> None:
    """V for counts of every kind and rows of several dtypes; C: two calls, and no row more than there is."""
    n, rank, kept = trial.size, trial.rank, []
    for case, (table, everyones) in _tables(trial).items():
        rows = everyones[rank].T.contiguous().T if "strided" in case else everyones[rank].clone()
        result = trial.call(rows, list(table[rank]), case=case)
        arrived = torch.cat([everyones[each].split(table[each])[rank] for each in range(n)])
        kept.append((result, arrived, f"the result for {case}, kept until now,"))
        trial.value(result, arrived, every_bit=True)
        row = rows.shape[1] * rows.element_size()
        wire = [(n - 1) * _INTEGER + row * (sum(table[each]) - table[each][each]) for each in range(n)]
        trial.cost(calls={"all_to_all": 2}, max_wire_bytes=max(wire))
    for result, arrived, what in kept:
        trial.value(result, arrived, what, every_bit=True)


def _tables(trial: Trial) -> dict[str, tuple[list[list[int]], list[torch.Tensor]]]:
    """By case: the counts of all ranks, and the rows of all ranks."""
    n = trial.size
    two, nothing = [[2] * n for _ in range(n)], [[0] * n for _ in range(n)]
    drawn = torch.randint(0, 5, (n, n), generator=trial.generator()).tolist()
    to_last = [[0] * (n - 1) + [5001 + each if each < n - 1 or n == 1 else 0] for each in range(n)]
    without = [[0] * n, *([0, *(1 + other for other in range(1, n))] for _ in range(1, n))]
    cases = {
        "two rows to each": (two, torch.float64, 2),
        "two rows to each from rank 0, others from the others": ([two[0], *drawn[1:]], torch.float64, 2),
        "all rows to the last rank, strided": (to_last, torch.float32, 2),
        "two rows to each, of many columns": (two, torch.float32, WIDE),
        "no rows at all": (nothing, torch.float64, 2),
        f"counts {drawn}, int64": (drawn, torch.int64, 3),
        "nothing from rank 0 and nothing to it, bfloat16": (without, torch.bfloat16, 1),
        "NaN, inf, 0 and -0.0": ([[3 + each] * n for each in range(n)], torch.float64, 1),
    }
    everyones = {
        case: [_numbered(rank, sum(row), columns, dtype).to(trial.device) for rank, row in enumerate(table)]
        for case, (table, dtype, columns) in cases.items()
    }
    for rows in everyones["NaN, inf, 0 and -0.0"]:
        rows[:3, 0], rows[-1] = torch.tensor([torch.nan, torch.inf, 0.0]), -0.0
    return {case: (table, everyones[case]) for case, (table, _, _) in cases.items()}


def _numbered(rank: int, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers that the next smaller dtype can't hold."""
    numbers = torch.arange(rows * columns).view(rows, columns) + 100 * rank - 3
    if dtype is torch.int64:
        return numbers + 2**55
    return numbers.to(dtype) * (1 + 2.0**-40 if dtype is torch.float64 else 1)


SHIFT = Exercise(shift, examine_shift, also_named=("ring_shift",))
SEND_ROWS = Exercise(send_rows, examine_send_rows, also_named=("exchange_rows",))
EXERCISES = (SHIFT, SEND_ROWS)
