"""Lesson 11, ZeRO and FSDP: ZeRO-1 as a function, the reduction of ZeRO-2, and the bytes that each stage holds."""

import copy
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.common.accounting import set_up
from scratch_ddp.course.exercise import Exercise
from scratch_ddp.course.guard import GRADIENTS, VALUES
from scratch_ddp.course.trial import Trial
from scratch_ddp.instruments.cost.memory import STAGES, model_states
from scratch_ddp.instruments.traffic import ring_bytes

NUMBER = 8  # bytes of a float64


def sharded_optimizer(params, make):
    """Return (own, step, zero_grad): ZeRO-1 for a list of parameters, of equal values on all ranks.

    Parameter i belongs to rank i % n; every rank owns at least one. `make` turns a list of
    parameters into an ordinary optimizer: own is one that has state for what this rank owns
    only. step() updates all parameters on every rank, as make(params).step() would; all ranks
    have the same gradients then. zero_grad() sets the gradients to None.
    Cost: one broadcast per parameter at each step.
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
    """Leave in .grad the mean over the ranks on the parameter's owner, None elsewhere: ZeRO-2.

    Parameter i belongs to rank i % n. Every rank has a gradient of its own for every parameter.
    Cost: one reduce per parameter.
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


def _parameters(trial: Trial) -> list[nn.Parameter]:
    """Two or three for each rank, of several shapes; the same values on every rank."""
    shapes = [(3,), (2, 2), (1,), (5, 2), ()]
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shapes[i % 5], generator=generator, dtype=torch.float64) for i in range(2 * trial.size + 1)]
    return [nn.Parameter(tensor.to(trial.device)) for tensor in tensors]


def _gradients(params: list[nn.Parameter], rank: int, step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(p.shape, generator=generator, dtype=p.dtype).to(p.device) for p in params]


def _mean_gradients(params: list[nn.Parameter], n: int, step: int) -> list[torch.Tensor]:
    everyones = [_gradients(params, rank, step) for rank in range(n)]
    return [sum(each) / n for each in zip(*everyones, strict=True)]


def _adam(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.1)


def _train(answer: Callable, params: list[nn.Parameter], rank: int, steps: int) -> int:
    """Train with the answer as a loop would: backward adds to .grad, then it is averaged. Return elements of state."""
    made = []

    def make(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        made.append(_adam(params))
        return made[-1]

    own, step, zero_grad = answer(params, make)
    for number in range(steps):
        for parameter, gradient in zip(params, _gradients(params, rank, number), strict=True):
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
            with set_up():  # not the answer's own
                parameter.grad /= dist.get_world_size()
                dist.all_reduce(parameter.grad)
        step()
        zero_grad()
    optimizers = made if own in made else [own, *made]
    states = [state for optimizer in optimizers for state in optimizer.state.values()]
    return sum(tensor.numel() for state in states for tensor in state.values() if tensor.dim())


def examine_sharded_optimizer(trial: Trial) -> None:
    """V against one process with all gradients, A, M: elements of state, C: broadcasts; after one step and two."""
    for steps in (1, 2):
        params = _parameters(trial)
        alone = copy.deepcopy(params)
        plain = _adam(alone)
        for number in range(steps):
            for parameter, mean in zip(alone, _mean_gradients(params, trial.size, number), strict=True):
                parameter.grad = mean
            plain.step()
        case = f"{steps} step{'s' if steps > 1 else ''}"
        held = trial.call(params, trial.rank, steps, case=case, using=_train, changes=[VALUES, GRADIENTS])
        for i, (parameter, expected) in enumerate(zip(params, alone, strict=True)):
            trial.value(parameter.detach(), expected.detach(), f"parameter {i}", tolerance=1e-9)
        left = [i for i, parameter in enumerate(params) if parameter.grad is not None]
        trial.criterion("value", f"parameters {left} still have a gradient" if left else "", "after zero_grad()")
        trial.agreement([parameter.detach() for parameter in params])
        room = 2 * sum(parameter.numel() for parameter in params[trial.rank :: trial.size] if parameter.dim())
        trial.criterion("memory", _too_much(held, room), "the state of all optimizers made")
        trial.cost(calls={"broadcast": steps * len(params)})


def _too_much(held: object, room: int) -> str:
    return f"has {held} elements, budget {room}" if isinstance(held, int) and held > room else ""


def examine_reduce_to_owners(trial: Trial) -> None:
    """V on the owners and None elsewhere, C: one reduce per parameter; M follows from the None."""
    params = _parameters(trial)
    for parameter, gradient in zip(params, _gradients(params, trial.rank, 0), strict=True):
        parameter.grad = gradient
    before = [parameter.detach().clone() for parameter in params]
    trial.call(params, changes=[GRADIENTS])
    means = _mean_gradients(params, trial.size, 0)
    for i, (parameter, mean) in enumerate(zip(params, means, strict=True)):
        if i % trial.size == trial.rank:
            trial.value(parameter.grad, mean, f"parameter {i}, which this rank owns: .grad", tolerance=1e-9)
    left = [i for i, p in enumerate(params) if i % trial.size != trial.rank and p.grad is not None]
    trial.criterion("memory", f"{left} are still there, should be None" if left else "", "gradients of others")
    trial.untouched([p.detach() for p in params], before, "the parameters")
    most = max(
        sum(ring_bytes("reduce", p.numel() * NUMBER, trial.size, rank, i % trial.size) for i, p in enumerate(params))
        for rank in range(trial.size)
    )
    trial.cost(calls={"reduce": len(params)}, max_wire_bytes=most)


SHARDED_OPTIMIZER = Exercise(sharded_optimizer, examine_sharded_optimizer)
REDUCE_TO_OWNERS = Exercise(reduce_to_owners, examine_reduce_to_owners)


def bytes_held(parameters, n, stage):
    """Return the bytes that one of n ranks holds of weights, gradients and optimizer state together.

    An integer. All in float32, under AdamW, which keeps two numbers for each parameter. stage 0
    is DDP, 1, 2 and 3 are ZeRO's. n divides the number of parameters.
    """
    # Which of the three does each stage share out?
    # answer: begin
    share = parameters // n
    weights = share if stage >= 3 else parameters
    gradients = share if stage >= 2 else parameters
    state = 2 * (share if stage >= 1 else parameters)
    return 4 * (weights + gradients + state)
    # answer: end


def examine_bytes_held(trial: Trial) -> None:
    """V: every stage, for some numbers of ranks; the same formulas as the package's."""
    for stage, name in enumerate(STAGES):
        for parameters, n in ((1_000_000, 2), (7_500_000_000, 64), (12, 1)):
            result = trial.call(parameters, n, stage, case=f"{name}, {parameters:,} parameters, n={n}")
            trial.value(result, round(model_states(parameters, n, name).total))


BYTES_HELD = Exercise(bytes_held, examine_bytes_held)
EXERCISES = (SHARDED_OPTIMIZER, REDUCE_TO_OWNERS, BYTES_HELD)
