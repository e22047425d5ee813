"""Steps of training for lesson 11: parameters, gradients, optimizers, and what changes from step to step."""

import functools
import math
from collections.abc import Callable
from itertools import cycle, islice

import torch
from torch import nn

from scratch_ddp.course.trial import Trial
from scratch_ddp.course.wording import bits, times


def parameters_of_all_ranks(
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


def gradients_of(params: list[nn.Parameter], rank: int, step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    gradients = []
    for p in params:
        dtype = torch.complex128 if p.is_complex() else torch.float64
        gradients.append(torch.rand(p.shape, generator=generator, dtype=dtype).sub_(0.5).to(p.device, p.dtype))
    return gradients


def adam(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Matrices decay, as is usual, and the other parameters don't."""
    groups = [
        {"params": [each for each in params if (each.dim() > 1) == decays], "weight_decay": 0.1 * decays, "lr": lr}
        for decays, lr in ((True, 0.1), (False, 0.05))
    ]
    return torch.optim.AdamW(groups)


def adagrad(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Has its state at once, for all that it is given."""
    return torch.optim.Adagrad(params, lr=0.1)


def sgd_with_momentum(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-100, momentum=0.5)


def plain_sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def failing(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(params, lr=0.1)
    optimizer.register_step_pre_hook(_fail)
    return optimizer


def _fail(*_) -> None:
    raise ArithmeticError("this optimizer always fails")


def failing_once(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Its first step raises, and the next ones do what they should."""
    optimizer = torch.optim.SGD(params, lr=0.1)

    def fail(*_) -> None:
        hook.remove()
        _fail()

    hook = optimizer.register_step_pre_hook(fail)
    return optimizer


class Training:
    """Steps of a loop, with changes between them; the same for all parameters in one process and for an answer."""

    def __init__(self, params: list[nn.Parameter], make: Callable, n: int):
        self.params, self.n, self.made = params, n, []
        self._memory = [each.data for each in params]
        self._make, self._moved_to = make, []
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
                self._move(number)
            gradients = self._set_gradients(number)
            before = [None if each is None else bits(each) for each in gradients]
            self.params[2].requires_grad_(False)  # since its backward
            try:
                step()
            except ArithmeticError:
                if self._make is not failing_once or number:
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
        self._move_back()
        return complaint

    def _move(self, number: int) -> None:
        """Weights are loaded, every second one into other memory."""
        for i, parameter in enumerate(self.params):
            if i % 2 != number % 2:  # in the last of three steps not the first parameter
                parameter.data = parameter.data * -2
            else:
                parameter.data.mul_(-2)
        self._moved_to = [each.data_ptr() for each in self.params]

    def _move_back(self) -> None:
        """But not what lies elsewhere than it was moved to: the answer has done that."""
        for parameter, memory, place in zip(self.params, self._memory, self._moved_to, strict=False):
            if parameter.data_ptr() == place:
                parameter.data = memory.copy_(parameter.data)

    def _set_gradients(self, number: int) -> list[torch.Tensor | None]:
        """One parameter has none, in each step another; one is NaN. With momentum: huge ones. In step 2 all are 0."""
        gradients: list[torch.Tensor | None] = gradients_of(self.params, 0, number)  # on all ranks, as the mean is
        if self._make is sgd_with_momentum:
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


def _step_wrapped_anew(own: torch.optim.Optimizer, step: Callable, calls: list[int]) -> None:
    """Wrap own.step, as a scheduler does, and step. calls: gets an entry for each call of it."""
    before = own.step

    def wrapped(*args: object, **options: object) -> object:
        if own.step is wrapped:
            calls.append(1)
        return before(*args, **options)

    own.step = wrapped
    try:
        step()
    finally:
        own.step = before


def train(answer: Callable, params: list[nn.Parameter], training: Training, steps: int) -> tuple[str, int]:
    """Train with the answer. Return a complaint about gradients, and elements of state."""
    training.params[4].requires_grad_(False)  # it counts as any other
    own, step, zero_grad = answer(params, training.make)
    training.params[4].requires_grad_()
    calls: list[int] = []
    complaint = training.run(own, functools.partial(_step_wrapped_anew, own, step, calls), zero_grad, steps)
    if len(calls) != steps:
        often = times(len(calls)) if calls else "in no step"
        how = f"calls own.step as it is now, wrapped anew before each step, {often}, should do so {times(steps)}"
        complaint = complaint or how
    return complaint, max(training.most, training.state_elements(own))
