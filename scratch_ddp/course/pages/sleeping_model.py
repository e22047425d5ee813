"""Models that only take time: for measuring what communication strategies cost, on any machine, at any speed.

Their forward and backward sleep for a given time. Gradients arrive one after the other at given times, through
autograd, so that every strategy's hooks fire as they do for a real model. `SleepingModel` has parameters of any sizes,
as for DDP; `SleepingBlocks` has equal blocks, as for sharding.
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

    The parameters are registered in the reverse order of the gradients, as in a real model. Sizes are rounded to whole
    float32 numbers. `model()` returns a loss; each gradient is all ones.

    The time of hooks adds to the compute, as if the processor computed. With `gpu` they run beside the compute, as if
    the processor only launched a GPU's work: gradients are ready in time as long as the hooks keep up.
    """

    def __init__(self, timeline: Backward, gpu: bool = False):
        super().__init__()
        self.timeline, self.gpu = timeline, gpu
        self.weights = nn.ParameterList(torch.zeros(round(size / _ELEMENT)) for size in reversed(timeline.nbytes))
        self._clock = _Clock(each_layer=not gpu)
        times = [0.0, *timeline.ready, timeline.seconds]
        *lengths, self._rest = times[1:] if gpu else [later - one for one, later in itertools.pairwise(times)]
        for weight, length in zip(self.weights, reversed(lengths), strict=True):
            weight.register_post_accumulate_grad_hook(_waits(self._clock, length))  # before any strategy's hooks

    def forward(self) -> torch.Tensor:
        """Sleep for the forward's seconds; return 0, which depends on every parameter. No communication."""
        until = now() + self.timeline.forward
        x = _InBackward.apply(torch.zeros((), requires_grad=True), self._end)
        for weight in self.weights:
            x = _Layer.apply(x, weight, self._clock.layer_begins)
        sleep_until(until)
        return _InBackward.apply(x, self._clock.start)

    def _end(self) -> None:
        self._clock.layer_begins()
        self._clock.wait(self._rest)


def scaled(timeline: Backward, factor: float) -> Backward:
    """The same timeline with every gradient `factor` times as large, but at least one float32 number."""
    sizes: Sequence[int] = [max(_ELEMENT, _ELEMENT * round(size * factor / _ELEMENT)) for size in timeline.nbytes]
    return Backward(timeline.ready, tuple(sizes), timeline.seconds, timeline.forward)


class SleepingBlocks(nn.Module):
    """`count` blocks that share `nbytes` of float32 parameters, and the seconds of `forward` and `backward`, evenly.

    `model()` returns a loss; each gradient is all ones. One number belongs to no block.
    """

    def __init__(self, count: int, nbytes: int, forward: float, backward: float):
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(1))
        elements = nbytes // count // _ELEMENT
        self.blocks = nn.ModuleList(SleepingBlock(elements, forward / count, backward / count) for _ in range(count))

    def forward(self) -> torch.Tensor:
        """Sleep for the forward's seconds; return 0, which depends on every parameter. No communication."""
        x = self.scale * 1.0
        for block in self.blocks:
            x = block(x)
        return x.sum()


class SleepingBlock(nn.Module):
    """A layer of so many parameters whose forward and backward take so many seconds. It returns its input."""

    def __init__(self, elements: int, forward: float, backward: float):
        super().__init__()
        self.weight, self.seconds = nn.Parameter(torch.zeros(elements)), (forward, backward)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        forward, backward = self.seconds
        sleep_until(now() + forward)
        return _Layer.apply(x, self.weight, lambda: sleep_until(now() + backward))


class _Clock:
    """Waits until some seconds after the backward's start, or after the start of its current layer."""

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
    """A hook by which a gradient is ready at its time, however long autograd took for it."""
    return lambda _: clock.wait(seconds)


class _Layer(torch.autograd.Function):
    """Returns its input. In backward it calls a function; its weight's gradient is all ones."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, function: Callable[[], None]) -> torch.Tensor:
        ctx.shape, ctx.function = weight.shape, function
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        ctx.function()
        return grad, torch.ones(ctx.shape), None


class _InBackward(torch.autograd.Function):
    """Returns its input. In backward it calls a function."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, function: Callable[[], None]) -> torch.Tensor:
        ctx.function = function
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        ctx.function()
        return grad, None
