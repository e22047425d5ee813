"""Lesson 11, ZeRO and FSDP: ZeRO-1 as a function, the reduction of ZeRO-2, and the bytes of each stage."""

from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.course.exercise import Exercise


def sharded_optimizer(params, make):
    """Return (own, step, zero_grad): ZeRO-1 for a list of parameters, equal everywhere.

    Parameter i belongs to rank i % n. `make` makes an optimizer of a list of
    parameters. own has state for this rank's parameters only. step() does to all
    parameters what make(params).step() would. zero_grad() sets all gradients to None.
    Cost: one broadcast for each parameter at each step.
    """
    rank, n = dist.get_rank(), dist.get_world_size()
    # Who updates what, and how do the others get it?
    own = make(params[rank::n])

    def step():
        own.step()
        for i, parameter in enumerate(params):
            dist.broadcast(parameter.detach(), src=i % n)

    def zero_grad():
        for parameter in params:
            parameter.grad = None

    return own, step, zero_grad


def _parameters(at):
    """n + 1 parameters with gradients, which differ on the ranks."""
    params = [nn.Parameter(torch.full((2, i + 1), float(i), dtype=torch.float64)) for i in range(at.n + 1)]
    for i, parameter in enumerate(params):
        parameter.grad = torch.full_like(parameter, 10.0**i * (at.rank + 1))
    torch.optim.Adam(params)  # torch imports what the first optimizer needs, which takes seconds: not in the answer
    yield "n + 1 parameters", (params,)


def _stepped(answer, params):
    own, step, zero_grad = answer(params, partial(torch.optim.Adam, lr=0.1))
    for number in range(2):
        for i, parameter in enumerate(params):
            parameter.grad = torch.full_like(parameter, (-1.0) ** i * (number + 1))
        step()
        yield "value", f"step {number}", params
        yield "memory", f"step {number}: the number of parameters that have state", len(own.state)
        zero_grad()
        yield "value", f"after zero_grad() in step {number}", params


def reduce_to_owners(params):
    """ZeRO-2: on a parameter's owner, leave in .grad the mean of all ranks' gradients.

    On the other ranks leave None. Parameter i belongs to rank i % n. Every rank has a
    gradient for every parameter. Cost: one reduce for each parameter.
    """
    rank, n = dist.get_rank(), dist.get_world_size()
    # What is in the tensor of a rank that is not the destination of a reduce?
    for i, parameter in enumerate(params):
        parameter.grad /= n
        dist.reduce(parameter.grad, dst=i % n)
        if i % n != rank:
            parameter.grad = None


def bytes_held(parameters, n, stage):
    """Return the bytes that one of n ranks holds of weights, gradients and state.

    All in float32, under AdamW, which keeps two numbers for each parameter. stage 0 is
    DDP; 1, 2 and 3 are ZeRO's. n divides the number of parameters.
    """
    # Which of the three does each stage share out?
    share = parameters // n
    weights = share if stage >= 3 else parameters
    gradients = share if stage >= 2 else parameters
    state = 2 * (share if stage >= 1 else parameters)
    return 4 * (weights + gradients + state)


EXERCISES = (
    Exercise(sharded_optimizer, _parameters, use=_stepped, close=1e-9),
    Exercise(reduce_to_owners, _parameters, close=1e-9),
    Exercise(bytes_held, [(1_000 * n, n, stage) for n in (1, 8) for stage in range(4)]),
)
