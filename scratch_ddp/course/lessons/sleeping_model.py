"""A model that only takes time: for measuring what strategies of communication cost, on any machine, at any speed.

Its forward and backward sleep as long as they are told to, and its gradients arrive one after the other at given
moments, through autograd, so that every strategy's hooks fire as they do for a real model.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from scratch_ddp.instruments.cost import Backward
from scratch_ddp.instruments.network.clock import now, sleep_until

_ELEMENT = 4  # bytes of a float32


class SleepingModel(nn.Module):
    """Parameters of the sizes in `timeline`, whose gradients are ready when it says, in a backward as long as it says.

    The parameters are registered in the reverse of the gradients' order, as a model's are. Sizes are rounded to whole
    float32 numbers. `model()` returns a loss; each gradient is all ones.

    What hooks take comes on top of the compute, as where the processor computes. With `gpu` they run beside it, as
    where a processor only tells a GPU what to do: gradients are ready at their moments as long as the hooks keep up.
    """

    def __init__(self, timeline: Backward, gpu: bool = False):
        super().__init__()
        self.timeline, self.gpu = timeline, gpu
        self.weights = nn.ParameterList(torch.zeros(round(size / _ELEMENT)) for size in reversed(timeline.nbytes))
        self._clock = _Clock(each_layer=not gpu)
        moments = [0.0, *timeline.ready, timeline.seconds]
        *lengths, self._rest = moments[1:] if gpu else [later - one for one, later in itertools.pairwise(moments)]
        for weight, length in zip(self.weights, reversed(lengths), strict=True):
            weight.register_post_accumulate_grad_hook(_waits(self._clock, length))  # before any strategy's hooks

    def forward(self) -> torch.Tensor:
        """Sleep for the forward's seconds; returns 0, which depends on every parameter. No communication."""
        until = now() + self.timeline.forward
        x = _InBackward.apply(torch.zeros((), requires_grad=True), self._end)
        for weight in self.weights:
            x = _Layer.apply(x, weight, self._clock)
        sleep_until(until)
        return _InBackward.apply(x, self._clock.start)

    def _end(self) -> None:
        self._clock.layer_begins()
        self._clock.wait(self._rest)


class _Clock:
    """Waits by the seconds since the backward began, or since its present layer did."""

    def __init__(self, each_layer: bool):
        self._each_layer, self._began = each_layer, 0.0

    def start(self) -> None:
        self._began = now()

    def layer_begins(self) -> None:
        if self._each_layer:
            self.start()

    def wait(self, seconds: float) -> None:
        sleep_until(self._began + seconds)


def _waits(clock: _Clock, seconds: float) -> Callable[[torch.Tensor], None]:
    """A hook with which a gradient is ready at its moment, whatever autograd took to make it."""
    return lambda _: clock.wait(seconds)


class _Layer(torch.autograd.Function):
    """Hands its input on; its weight's gradient is all ones."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, clock: _Clock) -> torch.Tensor:
        ctx.shape, ctx.clock = weight.shape, clock
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        ctx.clock.layer_begins()
        return grad, torch.ones(ctx.shape), None


class _InBackward(torch.autograd.Function):
    """Hands its input on, and calls a function when the backward comes by."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, function: Callable[[], None]) -> torch.Tensor:
        ctx.function = function
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        ctx.function()
        return grad, None


def scaled(timeline: Backward, factor: float) -> Backward:
    """The same timeline with every gradient `factor` times as large, each of one float32 number or more."""
    sizes: Sequence[int] = [max(_ELEMENT, _ELEMENT * round(size * factor / _ELEMENT)) for size in timeline.nbytes]
    return Backward(timeline.ready, tuple(sizes), timeline.seconds, timeline.forward)


# FOLDED: A model of blocks that only take time, for measuring how a sharded model hides its communication.


class SleepingBlocks(nn.Module):
    """`count` blocks that share `nbytes` of float32 parameters, and seconds of `forward` and `backward`, evenly.

    `model()` returns a loss; each gradient is all ones. One number belongs to no block.
    """

    def __init__(self, count: int, nbytes: int, forward: float, backward: float):
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(1))
        self.blocks = nn.ModuleList(
            _Block(nbytes // count // 4, forward / count, backward / count) for _ in range(count)
        )

    def forward(self) -> torch.Tensor:
        """Sleep for the forward's seconds; returns 0, which depends on every parameter. No communication."""
        x = self.scale * 1.0
        for block in self.blocks:
            x = block(x)
        return x.sum()


class _Block(nn.Module):
    def __init__(self, elements: int, forward: float, backward: float):
        super().__init__()
        self.weight, self.seconds = nn.Parameter(torch.zeros(elements)), (forward, backward)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Sleep.apply(x, self.weight, *self.seconds)


class _Sleep(torch.autograd.Function):
    """Hands its input on after a while, in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, forward: float, backward: float) -> torch.Tensor:
        ctx.shape, ctx.backward_seconds = weight.shape, backward
        sleep_until(now() + forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        sleep_until(now() + ctx.backward_seconds)
        return grad, torch.ones(ctx.shape), None, None
