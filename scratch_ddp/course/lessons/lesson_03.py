"""Lesson 03, naive data parallelism: the mean of gradients for any model, and for batches of any sizes."""

from collections.abc import Collection

import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.course.exercise import Exercise
from scratch_ddp.course.guard import GRADIENTS
from scratch_ddp.course.inputs.odd_tensors import OddModel, combined, gradient_of
from scratch_ddp.course.trial import Trial
from scratch_ddp.instruments.traffic import ring_bytes

COUNT = 8  # bytes of one int64
LONG = 100_003  # elements of the longest parameter


def average_gradients(model):
    """Replace the gradient of every trainable parameter by its mean over all ranks.

    Where a rank has none (`.grad` is None), it counts as zeros, also where no rank has one.
    Parameters are of any shape and dtype, NaN and inf stay what they are, and nothing overflows
    where the mean itself does not. Parameters with `requires_grad=False` are left alone, also a
    `.grad` that they still have.
    Cost: at most one all-reduce for each trainable parameter, of the parameter's size.
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

    This rank's is that of the mean loss over its own `items` items (an int). A rank with no
    items has no gradients (`.grad` is None), or only NaN; any other NaN is a real one and has
    to be seen in the result. Some rank has items, and then all its gradients; every parameter
    is trainable, of any shape and dtype. Nothing overflows where the result itself does not, and
    the result is right to six digits, in half precision to two.
    Cost: at most one all-reduce for each parameter, and one of a single number.
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


def _shuffled_in_memory(trial: Trial) -> nn.ParameterList:
    """Six parameters: what goes through them by address, or through a set, takes another order on odd ranks."""
    made = sorted(_model(trial, *[(2,)] * 32), key=lambda parameter: (id(parameter) % 32, id(parameter)))
    chosen = [*made[:3], *made[-3:]]  # a small set goes by the last bits of an address
    return nn.ParameterList(chosen[::-1] if trial.rank % 2 else chosen)


def _trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def _give_gradients(trial: Trial, parameters: dict[str, nn.Parameter], step: int, but: Collection[str] = ()) -> None:
    for name, parameter in parameters.items():
        parameter.grad = None if name in but else gradient_of(name, parameter, trial.rank, trial.size, step)


def _expect(
    trial: Trial, parameters: dict[str, nn.Parameter], means: dict[str, torch.Tensor], tolerance: float = 0.0
) -> None:
    for name, parameter in parameters.items():
        close = 0.02 if tolerance and means[name].dtype.itemsize == 2 else tolerance
        trial.value(parameter.grad, means[name], f"the gradient of {name!r}", close)
        trial.agreement(parameter.grad)


def _budget(trial: Trial, parameters: dict[str, nn.Parameter], extra_bytes: tuple[int, ...] = ()) -> None:
    sizes = [parameter.numel() * parameter.element_size() for parameter in parameters.values()] + [*extra_bytes]
    wire = sum(ring_bytes("all_reduce", size, trial.size, trial.rank) for size in sizes)
    trial.cost(calls={"all_reduce": len(sizes)}, max_wire_bytes=wire)


def examine_average_gradients(trial: Trial) -> None:
    """V, A, C: plain and tied models, unused parameters, and a model with every kind of tensor."""
    last = trial.size - 1
    doubles, odd = _model(trial, (3,), (3,), dtype=torch.float64), OddModel(trial.device)
    odd.long = _model(trial, (LONG,))[0]
    odd.frozen.grad.fill_(trial.rank)
    nobody = dict.fromkeys(range(trial.size), {"head.bias"})
    some = {"head.bias", "empty", "infinite", "scalar", "transposed", "complex", "inner.weight"}
    cases: list[tuple[str, nn.Module, dict[int, set[str]]]] = [  # by rank: the parameters that have no gradient there
        ("plain model", _model(trial, (3,), (2, 2)), {}),
        ("parameters in another order in memory on odd ranks", _shuffled_in_memory(trial), {}),
        ("tied weight", _Tied(_model(trial, (2, 2))[0]).to(trial.device), {}),
        ("rank 0 did not use '1', rank 1 not '0'", doubles, {0: {"1"}, 1: {"0"}}),
        (f"rank {last} used no parameter", doubles, {last: {"0", "1"}}),
        ("many kinds of tensors, some unused on rank 0, 'head.bias' on all", odd, nobody | {0: some}),
    ]
    for step, (case, model, unused) in enumerate(cases):
        if not trial.on_all_ranks and "did not use" not in case:
            continue
        parameters = _trainable(model)
        _give_gradients(trial, parameters, step, unused.get(trial.rank, ()))
        means = {
            name: combined(
                name, parameter, [name not in unused.get(rank, ()) for rank in range(trial.size)], trial.size, step
            )
            for name, parameter in parameters.items()
        }
        trial.call(model, case=case, changes=[GRADIENTS])
        _expect(trial, parameters, means)
        _budget(trial, parameters)
        if "in memory" in case:
            trial.end_if_wrong()


def examine_average_unequal(trial: Trial) -> None:
    """V, A, C: equal batches and unequal ones, ranks without items, real NaN and inf, and every kind of tensor."""
    n, last = trial.size, trial.size - 1
    uneven, many = [3 + rank for rank in range(n)], [30_000 + rank for rank in range(n)]
    plain, odd = _model(trial, (3,), (2, 2)), OddModel(trial.device, frozen=False)
    odd.long = _model(trial, (LONG,))[0]
    tied = _Tied(_model(trial, (2, 2))[0]).to(trial.device)
    cases = [("2 items each", plain, [2] * n), (f"items {uneven}", plain, uneven)]
    if n > 1:
        cases.append(("rank 0 has no items, its gradient is NaN", plain, [0, *uneven[1:]]))
    cases.append(("a tied weight, and one item in all", tied, [0] * last + [1]))
    cases.append(("a real NaN: all of the last rank's gradient of '0'", plain, uneven))
    some = "rank 0 has no items, the others 30,000 and more: many kinds of tensors"
    cases.append((some, odd, [0, *many[1:]]) if n > 1 else ("many kinds of tensors", odd, many))
    if not trial.on_all_ranks:  # the others don't depend on the number of ranks
        cases = cases[1:3]
    for step, (case, model, items) in enumerate(cases):
        mine, parameters = items[trial.rank], _trainable(model)
        _give_gradients(trial, parameters, step, () if mine else parameters)
        means = {name: combined(name, each, items, sum(items), step) for name, each in parameters.items()}
        if "real NaN" in case:
            means["0"].fill_(torch.nan)
            if trial.rank == last:
                plain[0].grad.fill_(torch.nan)
        if "is NaN" in case and not mine:
            for parameter in plain:
                parameter.grad = torch.full_like(parameter, torch.nan, requires_grad=False)
        trial.call(model, mine, case=case, changes=[GRADIENTS])
        _expect(trial, parameters, means, tolerance=1e-6)
        _budget(trial, parameters, (COUNT,))


AVERAGE_GRADIENTS = Exercise(average_gradients, examine_average_gradients)
AVERAGE_UNEQUAL = Exercise(average_unequal, examine_average_unequal)
EXERCISES = (AVERAGE_GRADIENTS, AVERAGE_UNEQUAL)
