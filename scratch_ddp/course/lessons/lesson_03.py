"""Lesson 03, naive data parallelism: the mean of gradients for any model, and for batches of any sizes."""

import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.course.exercise import Exercise
from scratch_ddp.course.guard import GRADIENTS
from scratch_ddp.course.trial import Trial
from scratch_ddp.instruments.traffic import ring_bytes

COUNT = 8  # bytes of one int64


def average_gradients(model):
    """Replace the gradient of every trainable parameter by its mean over all ranks.

    Where a rank has none (`.grad` is None), it counts as zeros. Parameters with
    `requires_grad=False` are left alone, also a `.grad` that they still have.
    Cost: one all-reduce for each trainable parameter, of the parameter's size.
    """
    # Which ranks have to take part in a parameter's all-reduce, and what do they bring?
    # answer: begin
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        parameter.grad /= dist.get_world_size()  # before the sum, which could be too large for half precision
        dist.all_reduce(parameter.grad)
    # answer: end


def average_unequal(model, items):
    """Replace every gradient by the whole batch's.

    This rank's is that of the mean loss over its own `items` items. A rank with no items
    has no gradient (`.grad` is None), or NaN; any other NaN is a real one and has to be
    seen in the result. Every parameter is trainable.
    Cost: one all-reduce for each parameter, and one of a single number.
    """
    # Which share of the whole batch's mean is this rank's?
    # answer: begin
    total = torch.tensor(items, device=next(model.parameters()).device)
    dist.all_reduce(total)
    for parameter in model.parameters():
        if items == 0:
            parameter.grad = torch.zeros_like(parameter)  # not 0 * NaN, which is NaN
        parameter.grad *= items / total.item()
        dist.all_reduce(parameter.grad)
    # answer: end


class _Tied(nn.Module):
    """Two layers that share one weight, and a bias of their own each."""

    def __init__(self, first: nn.Parameter):
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.first.weight = self.second.weight = first


def _model(trial: Trial, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> nn.ParameterList:
    return nn.ParameterList(torch.ones(shape, dtype=dtype, device=trial.device) for shape in shapes)


def _gradient(parameter: nn.Parameter, rank: int, unit: float = 12.0) -> torch.Tensor:
    """Rank r's: (r+1)² times unit, 2·unit, 3·unit, …; exact when divided by 2, 3 or 4."""
    numbers = unit * torch.arange(1, parameter.numel() + 1, device=parameter.device) * (rank + 1) ** 2
    return numbers.to(parameter.dtype).view_as(parameter)


def _expect(trial: Trial, model: nn.Module, means: list[torch.Tensor], tolerance: float = 0.0) -> None:
    for (name, parameter), mean in zip(model.named_parameters(), means, strict=True):
        trial.value(parameter.grad, mean, f"the gradient of {name!r}", tolerance)
        trial.agreement(parameter.grad)


def _budget(trial: Trial, parameters: list[nn.Parameter], extra_bytes: tuple[int, ...] = ()) -> None:
    sizes = [parameter.numel() * parameter.element_size() for parameter in parameters] + [*extra_bytes]
    wire = sum(ring_bytes("all_reduce", size, trial.size, trial.rank) for size in sizes)
    trial.cost(calls={"all_reduce": len(sizes)}, max_wire_bytes=wire)


def examine_average_gradients(trial: Trial) -> None:
    """V, A, C: a plain model, a frozen parameter, one unused on a rank, half precision, a tied weight."""
    n = trial.size

    def mean(parameter: nn.Parameter, having: range | list[int], unit: float = 12.0) -> torch.Tensor:
        return sum(_gradient(parameter, rank, unit).double() for rank in having).div(n).to(parameter.dtype)

    plain = _model(trial, (3,), (2, 2))
    frozen = _model(trial, (3,), (4,))
    frozen[0].requires_grad_(False)
    frozen[0].grad = torch.full_like(frozen[0], trial.rank)  # an old one, from before it was frozen
    half = _model(trial, (2,), dtype=torch.float16)
    tied = _Tied(_model(trial, (2, 2))[0]).to(trial.device)
    cases = {"plain model": plain, "tied weight": tied, "half precision": half, "a frozen parameter": frozen}
    for case, model in cases.items():
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for parameter in trainable:
            parameter.grad = _gradient(parameter, trial.rank)
        if model is half:
            half[0].grad = torch.full_like(half[0], 40_000.0)  # two of them are too large for half precision
        trial.call(model, case=case, changes=[GRADIENTS])
        if model is frozen:
            trial.value(frozen[1].grad, mean(frozen[1], range(n)), "the gradient of '1'")
        else:
            means = [mean(parameter, range(n)) for parameter in trainable]
            _expect(trial, model, [torch.full_like(half[0], 40_000.0)] if model is half else means)
        _budget(trial, trainable)

    unused = _model(trial, (3,), (3,), dtype=torch.float64)
    unused[1].grad = _gradient(unused[1], trial.rank)
    if trial.rank != 1:
        unused[0].grad = _gradient(unused[0], trial.rank)
    trial.call(unused, case="rank 1 did not use '0'", changes=[GRADIENTS])
    others = [rank for rank in range(n) if rank != 1]
    _expect(trial, unused, [mean(unused[0], others), mean(unused[1], range(n))], tolerance=1e-6)
    _budget(trial, list(unused.parameters()))


def examine_average_unequal(trial: Trial) -> None:
    """V, A, C: equal batches, unequal ones, and a rank without any items, whose gradient is None or NaN."""
    n, rank = trial.size, trial.rank
    uneven = [3 + other for other in range(n)]
    cases = [("2 items each", [2] * n, None), (f"items {uneven}", uneven, None)]
    cases.append(("200 items and more", [200 + other for other in range(n)], None))
    cases.append(("a real NaN in the last rank's gradient", uneven, None))
    if n > 1:
        cases.append(("rank 0 has no items and no gradient", [0, *uneven[1:]], None))
        cases.append(("rank 0 has no items, its gradient is NaN", [0, *uneven[1:]], torch.nan))
    for case, items, empty in cases:
        model = _model(trial, (3,), (2, 2))
        if items[rank] or empty is not None:
            for parameter in model:
                mine = _gradient(parameter, rank)
                parameter.grad = mine if items[rank] else torch.full_like(mine, torch.nan)
        real = case.startswith("a real NaN")
        if real and rank == n - 1:
            model[0].grad[1] = torch.nan
        trial.call(model, items[rank], case=case, changes=[GRADIENTS])
        means = [sum(items[r] * _gradient(each, r).double() for r in range(n)) / sum(items) for each in model]
        if real:
            means[0][1] = torch.nan
        _expect(trial, model, [each.float() for each in means], tolerance=1e-6)
        _budget(trial, list(model), (COUNT,))


AVERAGE_GRADIENTS = Exercise(average_gradients, examine_average_gradients)
AVERAGE_UNEQUAL = Exercise(average_unequal, examine_average_unequal)
EXERCISES = (AVERAGE_GRADIENTS, AVERAGE_UNEQUAL)
