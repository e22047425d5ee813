"""Lesson 03, naive data parallelism: the mean of gradients for any model, and for batches of any sizes."""

import functools
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.course.exercise import Exercise
from scratch_ddp.course.guard import GRADIENTS
from scratch_ddp.course.inputs.odd_tensors import OddModel, combined, gradient_of
from scratch_ddp.course.inputs.one_process import tried_in_worlds
from scratch_ddp.course.trial import Trial
from scratch_ddp.instruments.traffic import ring_bytes

COUNT = 8  # bytes of one int64
_DTYPES = torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128
_FIRST, _OTHERS = _DTYPES[:1], _DTYPES[1:]  # tried with real messages; in one process only, which takes less time
_DIGITS = {torch.float16: 11, torch.bfloat16: 8, torch.float64: 40}  # binary ones; 24 otherwise
LONG = 100_003  # elements of the longest parameter


def average_gradients(model):
    """Replace the gradient of every trainable parameter by its mean over all ranks.

    Where a rank has none (`.grad` is None), it counts as zeros; if no rank has one, the mean is zeros.
    Parameters are of any shape and dtype, NaN and inf show in the mean, and nothing overflows
    where the mean itself does not. Parameters with `requires_grad=False` are left alone, as is any
    `.grad` that they still have.
    Cost: at most one all-reduce for each trainable parameter, and no more bytes than these have.
    """
    world_size = dist.get_world_size()
    # Which ranks have to take part in a parameter's all-reduce, and what do they bring?
    # answer: begin
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        parameter.grad /= world_size  # before the sum, which could be too large for half precision
        dist.all_reduce(parameter.grad)
    # answer: end


def average_unequal(model, items):
    """Replace every gradient by that of the mean loss over all ranks' items.

    Before, it is that of the mean loss over this rank's items; `items` (an int) is their number.
    A rank with no items has no gradients (`.grad` is None), or only NaN; any other NaN is a real
    one and has to be seen in the result. At least one rank has items, and a rank with items has
    all its gradients. Every parameter is trainable, of any shape and dtype. Nothing overflows
    where the result itself does not, and the result is right to six digits, in half precision
    to two.
    Cost: at most one all-reduce for each parameter, in its dtype, and one of a single number.
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
        self.first.weight = self.second.weight = first  # transposed


def _tied(trial: Trial) -> nn.Module:
    """Deep inside other modules."""
    return nn.Sequential(nn.Sequential(_Tied(nn.Parameter(torch.ones(2, 2).t())).to(trial.device)))


def _model(trial: Trial, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> nn.ParameterList:
    return nn.ParameterList(torch.ones(shape, dtype=dtype, device=trial.device) for shape in shapes)


def _shuffled_in_memory(trial: Trial) -> nn.ParameterList:
    """Six parameters: what goes through them by address, or through a set, takes another order on odd ranks."""
    made = [nn.Parameter(torch.ones(2, device=trial.device)) for _ in range(32)]
    made.sort(key=lambda parameter: (id(parameter) % 32, id(parameter)))
    chosen = [*made[:3], *made[-3:]]  # a small set goes by the last bits of an address
    return nn.ParameterList(chosen[::-1] if trial.rank % 2 else chosen)


def _frozen(trial: Trial) -> nn.ParameterList:
    """Two parameters, none of them trainable; one has a gradient from before."""
    model = _model(trial, (3,), (2, 2)).requires_grad_(False)
    model[0].grad = torch.full((3,), 7.0, device=trial.device)
    return model


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
    trial.cost(calls={"all_reduce": len(sizes)}, max_wire_bytes=_wire_bytes(sizes, trial.size))


def _wire_bytes(sizes: list[int], n: int) -> int:
    """Of messages of these sizes, each in a call of its own or several in one: a call is rounded by half a byte."""
    rounded = sum(2 * size % n != 0 for size in sizes)
    return ring_bytes("all_reduce", sum(sizes), n, 0) + (rounded + 1) // 2


def examine_average_gradients(trial: Trial) -> None:
    """V, A, C: plain and tied models, unused parameters, and a model with every kind of tensor."""
    last = trial.size - 1
    doubles = _model(trial, (3,), (3,), (1,), dtype=torch.float64)
    doubles[2].requires_grad_(False)
    odd = OddModel(trial.device, _FIRST)
    odd.long = _model(trial, (LONG,))[0]
    odd.frozen.grad.fill_(trial.rank)
    nobody = dict.fromkeys(range(trial.size), {"head.bias"})
    some = {"head.bias", "empty", "infinite", "scalar", "transposed", "inner.weight"}
    cases: list[tuple[str, nn.Module, dict[int, set[str]]]] = [  # by rank: the parameters that have no gradient there
        ("parameters in another order in memory on odd ranks", _shuffled_in_memory(trial), {}),
        ("tied weight", _tied(trial).eval(), {}),
        (f"rank 0 did not use '1', rank {last} neither this nor '0'", doubles, {0: {"1"}, last: {"0", "1"}}),
        ("many kinds of tensors, some unused on rank 0, 'head.bias' on all", odd, nobody | {0: some}),
        ("every parameter is frozen", _frozen(trial), {}),
    ]
    # If ranks take the parameters of the first one in different orders, messages of the others would not fit.
    for part in (cases[:1], cases[1:]) if trial.on_all_ranks else (cases[2:3],):
        expected = {}
        for step, (case, model, unused) in enumerate(part):
            parameters = _trainable(model)
            _give_gradients(trial, parameters, step, unused.get(trial.rank, ()))
            used = {name: [name not in unused.get(rank, ()) for rank in range(trial.size)] for name in parameters}
            expected[case] = (
                parameters,
                {
                    name: combined(name, parameter, used[name], trial.size, step)
                    for name, parameter in parameters.items()
                },
            )
        called = trial.call_each({case: (model,) for case, model, _ in part}, changes=[GRADIENTS])
        for (parameters, means), _ in zip(expected.values(), called, strict=True):
            _expect(trial, parameters, means)
            _budget(trial, parameters)
        if trial.on_all_ranks:
            trial.end_if_wrong()
    if trial.on_all_ranks:
        _examine_drawn(trial, with_items=False)


def examine_average_unequal(trial: Trial) -> None:
    """V, A, C: equal batches and unequal ones, ranks without items, real NaN and inf, and every kind of tensor."""
    n = trial.size
    # Of 4 ranks, rank 1 has nearly a quarter of the items: 14 // 4, but not 14 / 4.
    uneven, many = [4, 3, 5, 6, *range(7, n + 3)][:n], [30_000 + rank for rank in range(n)]
    odd = OddModel(trial.device, _FIRST, frozen=False)
    odd.long = _model(trial, (LONG,))[0]
    cases = [("rank 0 has no items, its gradient is NaN: a tied weight", _tied(trial), [0, *uneven[1:]])]
    if n == 1:
        cases = [("4 items, a tied weight", _tied(trial), uneven)]
    some = "rank 0 has no items, the others 30,000 and more: many kinds of tensors"
    cases.append((some, odd, [0, *many[1:]]) if n > 1 else ("many kinds of tensors", odd, many))
    if not trial.on_all_ranks:  # the others don't depend on the number of ranks
        cases = cases[:1]
    expected = {}
    for step, (case, model, items) in enumerate(cases):
        mine, parameters = items[trial.rank], _trainable(model)
        _give_gradients(trial, parameters, step, () if mine else parameters)
        means = {name: combined(name, each, items, sum(items), step) for name, each in parameters.items()}
        if "is NaN" in case and not mine:
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, torch.nan, requires_grad=False)
        expected[case] = parameters, means
    given = {case: (model, items[trial.rank]) for case, model, items in cases}
    for (parameters, means), _ in zip(expected.values(), trial.call_each(given, changes=[GRADIENTS]), strict=True):
        _expect(trial, parameters, means, tolerance=1e-6)
        _budget(trial, parameters, (COUNT,))
    if trial.on_all_ranks:
        trial.end_if_wrong()
        _examine_drawn(trial, with_items=True)


@dataclass
class _Step:
    """By rank: its gradients and its items. And what the gradients shall be afterwards.

    Those of frozen parameters, named by their place, are stale: 7.
    """

    gradients: list[list[torch.Tensor | None]]
    items: list[int]
    frozen: set[int]
    means: list[torch.Tensor]


@dataclass
class _Drawn:
    """A model for each rank of a world, and two steps."""

    models: list[nn.ParameterList]
    steps: list[_Step]

    def arguments(self, with_items: bool) -> list[tuple]:
        """Of `_in_steps`, by rank."""
        return [
            (model, [(each.gradients[rank], each.items[rank : rank + with_items], each.frozen) for each in self.steps])
            for rank, model in enumerate(self.models)
        ]


def _in_steps(answer: Callable, model: nn.ParameterList, steps: list[tuple]) -> list[list[torch.Tensor | None]]:
    """Call the answer in each step, and return what the gradients were after it."""
    found = []
    for gradients, items, frozen in steps:
        for place, (parameter, gradient) in enumerate(zip(model, gradients, strict=True)):
            parameter.grad = gradient
            parameter.requires_grad_(place not in frozen)
        answer(model, *items)
        found.append([None if parameter.grad is None else parameter.grad.clone() for parameter in model])
    return found


def _drawn(n: int, generator: torch.Generator, with_items: bool) -> _Drawn:
    """Parameters of any dtypes and sizes. with_items: all trainable, with gradients where a rank has items."""

    def number(most: int) -> int:
        return int(torch.randint(0, most, (), generator=generator))

    drawn = _Drawn([nn.ParameterList().train(n % 2 == 0) for _ in range(n)], [])
    sizes = [int(2000 ** torch.rand((), generator=generator)) for _ in _DTYPES] + [1, 0, 1, 0]
    for place, size in enumerate(sizes):
        dtype = _DTYPES[(place + n) % len(_DTYPES)]
        shape = ((size,), (1, size), () if size == 1 else (size, 1, 1, 1, 1))[number(3)]
        for model in drawn.models:
            model.append(nn.Parameter(torch.zeros(shape, dtype=dtype)))
    for _ in range(2):
        items = [1, *(number(2) * number(10**5) * 30_000 ** number(2) for _ in range(n - 1))]
        items[1:2] = [2**32 * len(drawn.steps)] if n == 2 else items[1:2]  # first none, then more than an int32 holds
        frozen = {place for place in range(len(sizes)) if place and not with_items and number(4) == 0}
        drawn.steps.append(_Step([[] for _ in range(n)], items, frozen, []))
        for parameter in drawn.models[0]:
            _draw_gradients(drawn.steps[-1], parameter, number, generator, with_items)
    return drawn


def _draw_gradients(
    step: _Step, parameter: nn.Parameter, number: Callable[[int], int], generator: torch.Generator, with_items: bool
) -> None:
    n, shape, dtype = len(step.items), parameter.shape, parameter.dtype
    if len(step.means) in step.frozen:
        step.means.append(torch.full(shape, 7.0, dtype=dtype))
        for gradients in step.gradients:
            gradients.append(step.means[-1].clone())
        return
    there = [mine > 0 if with_items else number(4) > 0 for mine in step.items]
    # Shares of items are rounded, and so are complex numbers: those of one sign don't cancel.
    most = 2 ** _DIGITS.get(dtype, 24) // n**2  # sums are exact
    positive = with_items or dtype.is_complex
    numbers = torch.randint(1 if positive else -most, most + 1, (n, *shape), generator=generator).double()
    total = sum(step.items)
    shares = [mine / total if with_items else 1.0 for mine in step.items]  # without: gradients are n times as large
    if with_items and not dtype.is_complex and number(6) == 0:
        numbers[0] = torch.nan  # a real one: rank 0 has an item
    kept = [mine * share for mine, share, has in zip(numbers, shares, there, strict=True) if has]
    step.means.append(sum(kept, torch.zeros(shape)).to(dtype))
    for gradients, mine, has in zip(step.gradients, numbers, there, strict=True):
        nan = torch.full(shape, torch.nan, dtype=dtype) if with_items and number(2) else None
        gradients.append((mine * (1 if with_items else n)).to(dtype) if has else nan)


def _all_nan() -> _Drawn:
    """Two ranks with items. All gradients of rank 0 are NaN."""
    models = [nn.ParameterList(nn.Parameter(torch.zeros(size)) for size in (3, 1)) for _ in range(2)]
    gradients = [[torch.full_like(each, number) for each in models[0]] for number in (math.nan, 1.0)]
    return _Drawn(models, [_Step(gradients, [1, 3], set(), [each.clone() for each in gradients[0]])])


def _small_share() -> _Drawn:
    """Two ranks. Rank 0 has one item of 3,000,001, and all of the gradients: its share is small for a half."""
    dtypes = torch.float16, torch.bfloat16
    models = [nn.ParameterList(nn.Parameter(torch.zeros(2, dtype=each)) for each in dtypes) for _ in range(2)]
    gradients = [[torch.full_like(each, number) for each in models[0]] for number in (30_000.0, 0.0)]
    means = [(each.double() / 3_000_001).to(each.dtype) for each in gradients[0]]
    return _Drawn(models, [_Step(gradients, [1, 3_000_000], set(), means)])


def _of_other_dtypes(n: int, with_items: bool) -> _Drawn:
    """Large and tiny gradients, complex ones. Rank 0 has none, and no items."""
    found = [OddModel(torch.device("cpu"), _OTHERS, frozen=False).trainable() for _ in range(n)]
    names = [name for name, parameter in found[0].items() if parameter.dtype in _OTHERS]
    models = [nn.ParameterList(each[name] for name in names) for each in found]
    items = [0, *(30_000 + rank for rank in range(1, n))]
    gradients = [
        [gradient_of(name, each, rank, n) if rank else None for name, each in zip(names, model, strict=True)]
        for rank, model in enumerate(models)
    ]
    parts, total = (items, sum(items)) if with_items else ([rank > 0 for rank in range(n)], n)
    means = [combined(name, each, parts, total) for name, each in zip(names, models[0], strict=True)]
    return _Drawn(models, [_Step(gradients, items, set(), means)])


def _examine_drawn(trial: Trial, with_items: bool) -> None:
    """V and C with 1 to 9 ranks, for two steps of drawn models."""
    drawn: dict[str, _Drawn] = {}

    def arguments(case: str, draw: Callable[[], _Drawn]) -> list[tuple]:
        drawn[case] = draw()
        return drawn[case].arguments(with_items)

    draws = {}
    for number, n in enumerate((1, 2, 3 + trial.seed % 4, 7 + trial.seed % 3)):
        large = ", 2³² items on rank 1" if with_items and n == 2 else ""
        generator = torch.Generator().manual_seed(trial.seed + number)
        case = f"model {number} drawn with seed {trial.seed}{large}"
        draws[case] = functools.partial(_drawn, n, generator, with_items)
    draws["large, tiny and complex gradients"] = functools.partial(_of_other_dtypes, 3 + trial.seed % 3, with_items)
    draws[f"the loss of rank 0{', which has items,' * with_items} is NaN"] = _all_nan
    if with_items:
        draws["rank 0 has 1 of 3,000,001 items, and large gradients"] = _small_share
    makers = {case: functools.partial(arguments, case, draw) for case, draw in draws.items()}
    for case, world in tried_in_worlds(trial, makers, using=_in_steps):
        for rank, found in enumerate(world.results):
            for number, step in enumerate(drawn[case].steps):
                for place, (gradient, mean) in enumerate(zip(found[number], step.means, strict=True)):
                    exact = not with_items and not mean.is_complex()
                    rounded = 4 * torch.finfo(mean.dtype).eps  # also by who multiplies by 1 / n
                    close = rounded if exact else 0.02 if mean.dtype.itemsize == 2 else 1e-6
                    kind = str(mean.dtype).removeprefix("torch.")
                    what = f"{world.place} rank {rank}'s gradient of '{place}' ({kind}), step {number},"
                    trial.value(gradient, mean, what, close)
        sizes = [COUNT] * len(drawn[case].steps) * with_items
        for step in drawn[case].steps:
            sizes += [each.nbytes for place, each in enumerate(step.means) if place not in step.frozen]
        over = world.over_budget({"all_reduce": len(sizes)}, _wire_bytes(sizes, len(world.results)))
        steps = "two steps" if len(drawn[case].steps) > 1 else "one step"
        trial.criterion("cost", over, f"{world.place} {steps}:")


AVERAGE_GRADIENTS = Exercise(average_gradients, examine_average_gradients)
AVERAGE_UNEQUAL = Exercise(average_unequal, examine_average_unequal)
EXERCISES = (AVERAGE_GRADIENTS, AVERAGE_UNEQUAL)
