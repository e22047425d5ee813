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
from scratch_ddp.course.trial import Trial
from scratch_ddp.course.wording import bits
from scratch_ddp.instruments.traffic import ring_bytes


def sharded_optimizer(params, make):
    """Return (own, step, zero_grad): ZeRO-1 for a list of parameters, of equal values on all ranks.

    Parameter i belongs to rank i % n; every rank owns at least one. `make` turns a list of
    parameters into an ordinary optimizer: own is one that has state for what this rank owns
    only, and what is changed in its groups between steps, such as lr or weight decay, counts.
    step() does to all parameters, transposed ones too, what make(params).step() would, and leaves
    gradients alone; all ranks have the same ones then, or None. It raises what own.step() raises
    on its rank. zero_grad() sets all gradients to None. Cost: one broadcast per parameter at each
    step.
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


def _parameters(
    trial: Trial, number: int = 0, n: int = 0, dtypes: tuple[torch.dtype, ...] = (), first: int = 3
) -> list[nn.Parameter]:
    """Two or three for each of n ranks, or `number`; of several shapes, transposed; equal on every rank.

    first: elements of the first.
    """
    number = number or 2 * (n or trial.size) + 5
    shapes = list(islice(cycle([(3,), (2, 2), (1,), (5, 2), (), (0, 2), (3, 1, 2)]), number))
    shapes[0] = (first,)
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape[::-1], generator=generator, dtype=torch.float64).to(trial.device) for shape in shapes]
    tensors = [each.to(dtype) for each, dtype in zip(tensors, cycle(dtypes or [torch.float64]), strict=False)]
    return [nn.Parameter(each.transpose(0, -1)) for each in tensors]


def _gradients(params: list[nn.Parameter], rank: int, step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    gradients = []
    for p in params:
        dtype = torch.complex128 if p.is_complex() else torch.float64
        gradients.append(torch.rand(p.shape, generator=generator, dtype=dtype).sub_(0.5).to(p.device, p.dtype))
    return gradients


def _adam(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Matrices decay, as is usual, and the other parameters don't."""
    groups = [
        {"params": [each for each in params if (each.dim() > 1) == decays], "weight_decay": 0.1 * decays, "lr": lr}
        for decays, lr in ((True, 0.1), (False, 0.05))
    ]
    return torch.optim.AdamW(groups)


def _adagrad(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Has its state at once, for all that it is given."""
    return torch.optim.Adagrad(params, lr=0.1)


def _momentum(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-100, momentum=0.5)


def _plain(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def _failing(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(params, lr=0.1)
    optimizer.register_step_pre_hook(_fail)
    return optimizer


def _fail(*_) -> None:
    raise ArithmeticError("this optimizer always fails")


def _failing_once(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Its first step raises, and the next ones do what they should."""
    optimizer = torch.optim.SGD(params, lr=0.1)

    def fail(*_) -> None:
        hook.remove()
        _fail()

    hook = optimizer.register_step_pre_hook(fail)
    return optimizer


class _Training:
    """Steps of a loop, with changes between them; the same for all parameters in one process and for an answer."""

    def __init__(self, params: list[nn.Parameter], make: Callable, n: int):
        self.params, self.n, self.made = params, n, []
        self._make = make
        self.most = 0  # elements of state that there were after any optimizer's step

    def make(self, params: list[nn.Parameter]) -> torch.optim.Optimizer:
        self.made.append(self._make(params))
        self.made[-1].register_step_post_hook(self._stepped)
        return self.made[-1]

    def _stepped(self, *_) -> None:
        self.most = max(self.most, self.state_elements(self.made[-1]))

    def run(self, own: torch.optim.Optimizer, step: Callable, zero_grad: Callable, steps: int) -> str:
        """Return what a step has done to gradients and frozen parameters, as a complaint; "" if they are as before."""
        complaint = ""
        for number in range(steps):
            if number:  # a schedule, and weights that are loaded
                for group in own.param_groups:
                    group["lr"] *= 0.5
                    group["weight_decay"] += 0.25
                    if "momentum" in group:
                        group["momentum"] *= 0.5
                    if "betas" in group:
                        group["betas"] = 0.5, 0.75
                with torch.no_grad():
                    for parameter in self.params:
                        parameter.mul_(-2)
            gradients = self._set_gradients(number)
            before = [None if each is None else bits(each) for each in gradients]
            self.params[2].requires_grad_(False)  # since its backward
            try:
                step()
            except ArithmeticError:
                if self._make is not _failing_once or number:
                    raise
            finally:
                still_frozen = not self.params[2].requires_grad
                self.params[2].requires_grad_()
            if not still_frozen:
                complaint = complaint or "makes parameter 2 trainable, which was frozen"
            changed = [
                i
                for i, each in enumerate(self.params)
                if each.grad is not gradients[i] or (each.grad is not None and bits(each.grad) != before[i])
            ]
            complaint = complaint or (f"has changed the gradients of parameters {changed}" if changed else "")
            self.params[1].requires_grad_(False)
            zero_grad()
            self.params[1].requires_grad_()
        return complaint

    def _set_gradients(self, number: int) -> list[torch.Tensor | None]:
        """One parameter has none, in each step another; one is NaN. With momentum: huge ones. In step 2 all are 0."""
        gradients: list[torch.Tensor | None] = _gradients(self.params, 0, number)  # on all ranks, as the mean is
        if self._make is _momentum:
            gradients = [1e100 * each if each.dtype == torch.float64 else each for each in gradients]
            gradients[0][0] = gradients[7][0] = math.nan  # of two owners, in float64
        for each in gradients if number == 2 else [gradients[(6 + number) % len(gradients)]]:
            each.zero_()  # what has a state moves all the same
        gradients[(3 + number) % len(gradients)] = None
        if number == 1:  # a rank has nothing to update, and takes part all the same
            gradients[1 % self.n :: self.n] = [None for _ in gradients[1 % self.n :: self.n]]
        for parameter, gradient in zip(self.params, gradients, strict=True):
            parameter.grad = gradient
        return gradients

    def state_elements(self, own: torch.optim.Optimizer) -> int:
        optimizers = self.made if own in self.made else [own, *self.made]
        states = [state for optimizer in optimizers for state in optimizer.state.values()]
        return sum(tensor.numel() for state in states for tensor in state.values() if _holds(tensor))


def _holds(state: object) -> bool:
    return isinstance(state, torch.Tensor) and state.dim() > 0


def _train(answer: Callable, params: list[nn.Parameter], training: _Training, steps: int) -> tuple[str, int]:
    """Train with the answer. Return a complaint about gradients, and elements of state."""
    training.params[4].requires_grad_(False)  # it counts as any other
    own, step, zero_grad = answer(params, training.make)
    training.params[4].requires_grad_()
    complaint = training.run(own, step, zero_grad, steps)
    return complaint, max(training.most, training.state_elements(own))


def examine_sharded_optimizer(trial: Trial) -> None:
    """V against one process with all gradients, A, M: elements of state, C: broadcasts; after one step and three."""
    for steps, make, states in ((1, _adagrad, 1), (3, _adam, 2))[: 2 if trial.on_all_ranks else 1]:
        params, alone = _parameters(trial), _trained_alone(trial, make, trial.size, steps)
        case = f"{steps} step{'s' if steps > 1 else ''}"
        training = _Training(params, make, trial.size)
        complaint, held = trial.call(
            list(params), training, steps, case=case, using=_train, changes=[VALUES, GRADIENTS]
        )
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
    params = _parameters(trial)
    training = _Training(params, _failing, trial.size)
    trial.call(
        list(params),
        training,
        1,
        case="an optimizer whose step() raises",
        using=_train,
        changes=[VALUES, GRADIENTS],
        raises="ArithmeticError: this optimizer always fails",
    )


def _trained_alone(
    trial: Trial, make: Callable, n: int, steps: int, dtypes: tuple[torch.dtype, ...] = (), first: int = 3
) -> list[nn.Parameter]:
    """What one process makes of the same parameters."""
    alone = _parameters(trial, n=n, dtypes=dtypes, first=first)
    plain = make(alone)
    _Training(alone, make, n).run(plain, plain.step, plain.zero_grad, steps)
    return alone


def _sharded_in_worlds(trial: Trial) -> None:
    """V on every rank, C; on one rank, few and many; with several dtypes, momentum, and an optimizer without state."""
    few, many = (int(torch.randint(*ends, (), generator=trial.generator())) for ends in ((2, 5), (5, 10)))
    cases = {
        f"1 step of plain SGD, seed {trial.seed}": (few, _plain, 1, _DTYPES, 3),
        f"3 steps of SGD with huge gradients, seed {trial.seed}": (many, _momentum, 3, (), 3),
        "2 steps of SGD of odd dtypes": (2, _momentum, 2, (torch.float64, torch.float16, torch.complex128), 3),
        "2 steps of AdamW": (1, _adam, 2, (), 3),
        "1 step of plain SGD, one parameter large": (2, _plain, 1, (), LARGE),
        "2 steps of plain SGD, of which the first raises": (2, _failing_once, 2, (), 3),
    }
    everyone: dict[str, list[_Training]] = {}

    def ranks(case: str) -> list[tuple]:
        n, make, steps, dtypes, first = cases[case]
        everyone[case] = [_Training(_parameters(trial, n=n, dtypes=dtypes, first=first), make, n) for _ in range(n)]
        return [(list(each.params), each, steps) for each in everyone[case]]

    makers = {case: functools.partial(ranks, case) for case in cases}
    for case, world in tried_in_worlds(trial, makers, using=_train):
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
    plain = _parameters(trial, number=5 if trial.on_all_ranks else 4)
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
    few, many = (int(torch.randint(*ends, (), generator=trial.generator())) for ends in ((2, 5), (5, 10)))
    cases = {
        f"{many - 2} parameters, seed {trial.seed}": (many, many - 2),
        f"{2 * few + 12} parameters, seed {trial.seed}": (few, 2 * few + 12),
        "no parameters": (2, 0),
        "3 parameters": (1, 3),
        "8 parameters of one shape and dtype": (2, 8),
        "2 parameters, one of them large": (2, 2),
        "7 parameters with huge gradients": (2, 7),
    }
    everyone: dict[str, list[list[nn.Parameter]]] = {}
    gradients: dict[str, list[list[torch.Tensor]]] = {}

    def ranks(case: str) -> list[tuple]:
        n, number = cases[case]
        first = LARGE // 4 if "large" in case else 3
        plain = _parameters(trial, number=number, first=first) if number else []
        plain.sort(key=lambda each: each.shape)
        dtypes = list(islice(cycle((*_DTYPES, torch.complex128)), number))
        if "one shape" in case:
            plain, dtypes = plain[-1:] * number, dtypes[:1] * number
        everyone[case] = [
            [nn.Parameter(each.detach().to(dtype)) for each, dtype in zip(plain, dtypes, strict=True)] for _ in range(n)
        ]
        gradients[case] = [_gradients(params, rank, 7) for rank, params in enumerate(everyone[case])]
        for each in chain(*gradients[case]) if "huge" in case else ():
            each.fill_(0.75 * torch.finfo(each.dtype).max)
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
    gradients = _gradients(params, rank, 0)
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
