"""Lesson 11, ZeRO and FSDP: ZeRO-1 as a function, and the reduction of ZeRO-2."""

import functools
import math
from collections.abc import Callable
from itertools import chain, cycle, islice

import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.course.exercise import Exercise
from scratch_ddp.course.guard import GRADIENTS, VALUES
from scratch_ddp.course.inputs.every_kind import LARGE
from scratch_ddp.course.inputs.one_process import tried_in_worlds
from scratch_ddp.course.inputs.training_steps import (
    Training,
    adagrad,
    adam,
    failing,
    failing_once,
    gradients_of,
    parameters_of_all_ranks,
    plain_sgd,
    sgd_with_momentum,
    train,
)
from scratch_ddp.course.trial import Trial
from scratch_ddp.course.wording import bits
from scratch_ddp.instruments.traffic import ring_bytes


def sharded_optimizer(params, make):
    """Return (own, step, zero_grad): ZeRO-1 for a list of parameters, equal on all ranks.

    They lie in memory without gaps, some transposed. Parameter i belongs to rank i % n; every rank
    owns at least one. `make` turns a list of parameters into an ordinary optimizer: own is one that
    has state for what this rank owns only. step() does to all parameters what make(params).step()
    would, and leaves gradients alone, which are equal on all ranks, or None. It calls own.step(); if
    that raises, step() raises the same on that rank (the others are not told). Changes between steps
    take effect: to a setting in own's groups, to own.step (a scheduler wraps it), to a parameter's
    .data (by one of its shape and dtype). zero_grad() sets all gradients to None. Cost: one broadcast
    per parameter at each step.
    """
    rank, n = dist.get_rank(), dist.get_world_size()
    # Who updates what, and how do the others get it?
    # answer: begin
    own = make(params[rank::n])

    def step():
        own.step()
        for i, parameter in enumerate(params):
            dist.broadcast(parameter.detach(), src=i % n)

    def zero_grad():
        for parameter in params:
            parameter.grad = None

    return own, step, zero_grad
    # answer: end


def reduce_to_owners(params):
    """ZeRO-2: on each parameter's owner, leave in .grad the mean of all ranks' gradients.

    On the other ranks leave None. Parameter i belongs to rank i % n. Every rank has a contiguous
    gradient of its own for every parameter, of any shape and any floating-point or complex dtype.
    The mean comes out also where the sum would overflow. Cost: one reduce per parameter, in the
    same order on all ranks.
    """
    rank, n = dist.get_rank(), dist.get_world_size()
    # What is in the tensor of a rank that is not the destination of a reduce?
    # answer: begin
    for i, parameter in enumerate(params):
        parameter.grad /= n
        dist.reduce(parameter.grad, dst=i % n)
        if i % n != rank:
            parameter.grad = None
    # answer: end


def examine_sharded_optimizer(trial: Trial) -> None:
    """V against one process with all gradients, A, M: elements of state, C: broadcasts; after one step and three."""
    for steps, make, states in ((1, adagrad, 1), (3, adam, 2))[: 2 if trial.on_all_ranks else 1]:
        params, alone = parameters_of_all_ranks(trial), _trained_alone(trial, make, trial.size, steps)
        case = f"{steps} step{'s' if steps > 1 else ''}"
        training = Training(params, make, trial.size)
        complaint, held = trial.call(list(params), training, steps, case=case, using=train, changes=[VALUES, GRADIENTS])
        for i, (parameter, expected) in enumerate(zip(params, alone, strict=True)):
            trial.value(parameter.detach(), expected.detach(), f"parameter {i}")
        left = [i for i, parameter in enumerate(params) if parameter.grad is not None]
        trial.criterion("value", f"parameters {left} still have a gradient" if left else "", "after zero_grad()")
        trial.criterion("value", complaint, "step()")
        trial.agreement([parameter.detach() for parameter in params])
        room = states * sum(parameter.numel() for parameter in params[trial.rank :: trial.size] if parameter.dim())
        trial.criterion("memory", _too_much(held, room), "the state of all optimizers made")
        trial.cost(calls={"broadcast": steps * len(params)})
    if not trial.on_all_ranks:
        return
    trial.end_if_wrong()
    _sharded_in_worlds(trial)
    params = parameters_of_all_ranks(trial)
    training = Training(params, failing, trial.size)
    trial.call(
        list(params),
        training,
        1,
        case="an optimizer whose step() raises",
        using=train,
        changes=[VALUES, GRADIENTS],
        raises="ArithmeticError: this optimizer always fails",
    )


def _trained_alone(
    trial: Trial, make: Callable, n: int, steps: int, dtypes: tuple[torch.dtype, ...] = (), first: int = 3
) -> list[nn.Parameter]:
    """What one process makes of the same parameters."""
    alone = parameters_of_all_ranks(trial, n=n, dtypes=dtypes, first=first)
    plain = make(alone)
    Training(alone, make, n).run(plain, plain.step, plain.zero_grad, steps)
    return alone


def _sharded_in_worlds(trial: Trial) -> None:
    """V on every rank, C; on one rank, few and many; with several dtypes, momentum, and an optimizer without state."""
    few, many = (int(torch.randint(*ends, (), generator=trial.generator())) for ends in ((2, 5), (5, 10)))
    cases = {
        f"1 step of plain SGD, seed {trial.seed}": (few, plain_sgd, 1, _DTYPES, 3),
        f"3 steps of SGD with huge gradients, seed {trial.seed}": (many, sgd_with_momentum, 3, (), 3),
        "2 steps of SGD of odd dtypes": (2, sgd_with_momentum, 2, (torch.float64, torch.float16, torch.complex128), 3),
        "2 steps of AdamW": (1, adam, 2, (), 3),
        "1 step of plain SGD, one parameter large": (2, plain_sgd, 1, (), LARGE),
        "2 steps of plain SGD, of which the first raises": (2, failing_once, 2, (), 3),
    }
    everyone: dict[str, list[Training]] = {}

    def ranks(case: str) -> list[tuple]:
        n, make, steps, dtypes, first = cases[case]
        everyone[case] = [
            Training(parameters_of_all_ranks(trial, n=n, dtypes=dtypes, first=first), make, n) for _ in range(n)
        ]
        return [(list(each.params), each, steps) for each in everyone[case]]

    makers = {case: functools.partial(ranks, case) for case in cases}
    for case, world in tried_in_worlds(trial, makers, using=train):
        n, make, steps, dtypes, first = cases[case]
        alone = _trained_alone(trial, make, n, steps, dtypes, first)
        for rank, training in enumerate(everyone[case]):
            for i, (parameter, expected) in enumerate(zip(training.params, alone, strict=True)):
                what = f"{world.place} rank {rank}'s parameter {i} ({str(expected.dtype).removeprefix('torch.')})"
                if rank == 0 or bits(parameter) != bits(everyone[case][0].params[i]):
                    trial.value(parameter.detach(), expected.detach(), what)
            trial.criterion("value", world.results[rank][0], f"{world.place} rank {rank}'s step()")
        budget = {"broadcast": steps * len(alone)}
        trial.criterion("cost", world.over_budget(budget, 1 << 60), world.place)


def _too_much(held: object, room: int) -> str:
    return f"has {held} elements, budget {room}" if isinstance(held, int) and held > room else ""


def examine_reduce_to_owners(trial: Trial) -> None:
    """V on the owners and None elsewhere, C: one reduce per parameter; M follows from the None."""
    plain = parameters_of_all_ranks(trial, number=5 if trial.on_all_ranks else 4)
    params = [nn.Parameter(each.detach().to(dtype)) for each, dtype in zip(plain, cycle(_DTYPES), strict=False)]
    everyones = [_odd_gradients(params, rank) for rank in range(trial.size)]
    for parameter, gradient in zip(params, everyones[trial.rank], strict=True):
        parameter.grad = gradient.clone()
    before = [parameter.detach().clone() for parameter in params]
    most = max(
        sum(ring_bytes("reduce", p.nbytes, trial.size, rank, i % trial.size) for i, p in enumerate(params))
        for rank in range(trial.size)
    )
    trial.call(list(params), changes=[GRADIENTS])
    means = [sum(gradient / trial.size for gradient in gradients) for gradients in zip(*everyones, strict=True)]
    for i, (parameter, mean) in enumerate(zip(params, means, strict=True)):
        if i % trial.size == trial.rank:
            what, tolerance = f"parameter {i}, which this rank owns: .grad", 4 * torch.finfo(mean.dtype).eps
            trial.value(parameter.grad, mean, what, tolerance=max(1e-12, tolerance))
    left = [i for i, p in enumerate(params) if i % trial.size != trial.rank and p.grad is not None]
    trial.criterion("memory", f"{left} are still there, should be None" if left else "", "gradients of others")
    trial.untouched([p.detach() for p in params], before, "the parameters")
    trial.cost(calls={"reduce": len(params)}, max_wire_bytes=most)
    if trial.on_all_ranks:
        trial.end_if_wrong()
        _reduced_in_worlds(trial)


def _reduced_in_worlds(trial: Trial) -> None:
    """V, None elsewhere and C, with many parameters, fewer than ranks, none at all, and on one rank."""
    few, many = (int(torch.randint(*ends, (), generator=trial.generator())) for ends in ((2, 5), (5, 8)))
    cases = {
        f"{many - 2} parameters, seed {trial.seed}": (many, many - 2),
        f"{2 * few + 5} parameters, seed {trial.seed}": (few, 2 * few + 5),
        "no parameters": (2, 0),
        "3 parameters": (1, 3),
        "8 parameters of one shape and dtype": (2, 8),
        "2 parameters, one of them large": (2, 2),
        "7 parameters with huge gradients": (2, 7),
        "7 parameters with tiny gradients": (2, 7),
    }
    everyone: dict[str, list[list[nn.Parameter]]] = {}
    gradients: dict[str, list[list[torch.Tensor]]] = {}

    def ranks(case: str) -> list[tuple]:
        n, number = cases[case]
        first = LARGE // 4 if "large" in case else 3
        plain = parameters_of_all_ranks(trial, number=number, first=first) if number else []
        plain.sort(key=lambda each: each.shape)
        dtypes = list(islice(cycle((*_DTYPES, torch.complex128)), number))
        if "one shape" in case:
            plain, dtypes = plain[-1:] * number, dtypes[:1] * number
        everyone[case] = [
            [nn.Parameter(each.detach().to(dtype)) for each, dtype in zip(plain, dtypes, strict=True)] for _ in range(n)
        ]
        gradients[case] = [gradients_of(params, rank, 7) for rank, params in enumerate(everyone[case])]
        for each in chain(*gradients[case]) if "huge" in case else ():
            each.fill_(0.75 * torch.finfo(each.dtype).max)
        for each in chain(*gradients[case]) if "tiny" in case else ():
            each.fill_(3 * torch.finfo(each.dtype).tiny)  # a third of it would be rounded
        for params, own in zip(everyone[case], gradients[case], strict=True):
            for parameter, gradient in zip(params, own, strict=True):
                parameter.grad = gradient.clone(memory_format=torch.contiguous_format)
            for parameter in params[1::3]:  # frozen since
                parameter.requires_grad_(False)
        return [(list(params),) for params in everyone[case]]

    makers = {case: functools.partial(ranks, case) for case in cases}
    for case, world in tried_in_worlds(trial, makers):
        n, number = cases[case]
        for i, parts in enumerate(zip(*gradients[case], strict=True)):
            mean, what = sum(part / n for part in parts), f"{world.place} the owner's gradient of parameter {i}"
            tolerance = max(1e-12, 4 * torch.finfo(mean.dtype).eps)
            trial.value(everyone[case][i % n][i].grad, mean, what, tolerance=tolerance)
            left = [rank for rank, each in enumerate(everyone[case]) if rank != i % n and each[i].grad is not None]
            complaint = f"is still there on ranks {left}, should be None" if left else ""
            trial.criterion("memory", complaint, f"{world.place} the gradient of parameter {i}")
        trial.criterion("cost", world.over_budget({"reduce": number}, 1 << 60), world.place)


_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.complex64)
_HUGE = (1, 2, 4)


def _odd_gradients(params: list[nn.Parameter], rank: int) -> list[torch.Tensor]:
    """As others, but some: zeros on rank 0, some so large that the sum overflows, and one with NaN and infinity."""
    gradients = gradients_of(params, rank, 0)
    for i in _HUGE:
        if i < len(gradients):
            gradients[i].fill_(0.75 * torch.finfo(gradients[i].dtype).max)
    gradients[0].fill_(0.75 * torch.finfo(gradients[0].dtype).max * min(rank, 1))
    odd = [[math.nan, math.inf], [0, 1e100], [1e7, 1], [2, 3], [1.5e308, rank]]
    gradients[3].copy_(torch.tensor(odd, dtype=torch.float64))
    return gradients


SHARDED_OPTIMIZER = Exercise(sharded_optimizer, examine_sharded_optimizer)
REDUCE_TO_OWNERS = Exercise(reduce_to_owners, examine_reduce_to_owners)
EXERCISES = (SHARDED_OPTIMIZER, REDUCE_TO_OWNERS)
