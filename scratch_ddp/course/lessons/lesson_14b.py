"""Lesson 14b, context and experts: a shift that gradients travel back through, and rows that go to chosen ranks."""

from typing import Any

import torch
import torch.distributed as dist

from scratch_ddp.course.exercise import Exercise
from scratch_ddp.course.trial import Trial
from scratch_ddp.instruments.traffic import ring_bytes

_INTEGER = 8  # bytes


def shift(tensor, group=None):
    """Return the left neighbour's tensor: on rank 1 rank 0's, on rank 0 the last rank's.

    Gradients travel back: in backward each rank gets the gradient of what it has handed on, from
    its right neighbour. `tensor` has any shape and strides, the shape being the same on all ranks.
    A group of one rank keeps its own.
    Cost: n messages in forward and n in backward, one sent by each rank.
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
    """V of results and gradients, with weights that differ by rank, also after two shifts; C each way."""
    n, rank = trial.size, trial.rank
    for case, shape in (("6 numbers", (6,)), ("2 × 3, strided", (2, 3))):
        everyones = [_whole_numbers(trial, 10 * each, shape) for each in range(n)]
        weights = [_whole_numbers(trial, 100 + each, shape) for each in range(n)]
        tensor = everyones[rank].detach() if "strided" in case else everyones[rank].clone()
        result = trial.call(tensor.requires_grad_(), case=case)
        trial.value(result, everyones[(rank - 1) % n])
        _cost(trial, messages=n if n > 1 else 0)
        gradient = trial.call(result, tensor, weights[rank].clone(), case=f"{case}, backward", using=_gradient)
        trial.value(gradient, weights[(rank + 1) % n], "the gradient")
        _cost(trial, messages=n if n > 1 else 0)
    tensor, case = everyones[rank].clone().requires_grad_(), "shifted twice, the gradient of the sum"
    gradient = trial.call(tensor, case=case, using=_gradient_of_two_shifts)
    trial.value(gradient, torch.ones_like(tensor), "the gradient")
    with torch.no_grad():
        result = trial.call(everyones[rank].clone(), case="without gradients")
    trial.value(result, everyones[(rank - 1) % n])


def _whole_numbers(trial: Trial, seed: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Drawn, as every second column of a tensor twice as wide."""
    generator = torch.Generator().manual_seed(1000 * trial.seed + seed)
    wide = torch.randint(1, 100, (*shape[:-1], 2 * shape[-1]), generator=generator)
    return wide.double().to(trial.device)[..., ::2]


def _gradient(answer: Any, result: Any, tensor: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | None:
    """The gradient of (result · weight).sum(), or None where the result does not depend on the tensor."""
    if not isinstance(result, torch.Tensor) or not result.requires_grad:
        return None
    return torch.autograd.grad(result, tensor, weight, allow_unused=True)[0]


def _gradient_of_two_shifts(answer: Any, tensor: torch.Tensor) -> torch.Tensor | None:
    result = answer(answer(tensor))
    if not isinstance(result, torch.Tensor) or not result.requires_grad:
        return None
    return torch.autograd.grad(result.sum(), tensor, allow_unused=True)[0]


def _cost(trial: Trial, messages: int) -> None:
    trial.cost(messages=messages, max_messages=min(1, messages), only=("send", "recv"))


def send_rows(rows, counts, group=None):
    """Send the first counts[0] rows to rank 0, the next counts[1] to rank 1, and so on.

    Return what arrives, rank 0's rows first. `rows`: (sum(counts), columns), of any strides;
    `counts`: a list of n ints, each of which may be 0.
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
    """V for counts that are even, drawn, one rank's alone and zero; C: two calls, and no row more than there is."""
    n, rank = trial.size, trial.rank
    drawn = torch.randint(0, 5, (n, n), generator=trial.generator()).tolist()
    tables = {
        "two rows to each": [[2] * n for _ in range(n)],
        "all rows to the last rank, strided": [[0] * (n - 1) + [4 + each] for each in range(n)],
        "no rows at all": [[0] * n for _ in range(n)],
        f"counts {drawn}": drawn,
    }
    for number, (case, table) in enumerate(tables.items()):
        dtype, columns = (torch.float32, 3) if number % 2 else (torch.float64, 2)
        everyones = [_numbered(each, sum(table[each]), columns, dtype).to(trial.device) for each in range(n)]
        rows = everyones[rank].T.contiguous().T if "strided" in case else everyones[rank]
        arrived = [everyones[each].split(table[each])[rank] for each in range(n)]
        result = trial.call(rows, table[rank], case=case)
        trial.value(result, torch.cat(arrived))
        row = columns * rows.element_size()
        wire = [
            sum(ring_bytes("all_to_all", size, n, each) for size in (n * _INTEGER, row * sum(table[each])))
            for each in range(n)
        ]
        trial.cost(calls={"all_to_all": 2}, max_wire_bytes=max(wire))


def _numbered(rank: int, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(rows * columns, dtype=dtype).view(rows, columns) + 100 * rank


SHIFT = Exercise(shift, examine_shift)
SEND_ROWS = Exercise(send_rows, examine_send_rows)
EXERCISES = (SHIFT, SEND_ROWS)
