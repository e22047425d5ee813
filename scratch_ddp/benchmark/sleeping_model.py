"""A model that only takes time: for measuring what strategies of communication cost, on any machine, at any speed.

Its forward and backward sleep as long as they are told to, and its gradients arrive one after the other at given
moments, through autograd, so that every strategy's hooks fire as they do for a real model.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from scratch_ddp.cost import Backward
from scratch_ddp.link.sleep import now, sleep_until

_ELEMENT = 4  # bytes of a float32


class SleepingModel(nn.Module):
    """Parameters of the sizes in `timeline`, whose gradients are ready when it says, in a backward as long as it says.

    The parameters are registered in the reverse of the gradients' order, as a model's are. Sizes are rounded to whole
    float32 numbers. `model()` returns a loss; each gradient is all ones. What hooks take comes on top, as where the
    processor computes.
    """

    def __init__(self, timeline: Backward):
        super().__init__()
        self.timeline = timeline
        self.weights = nn.ParameterList(torch.zeros(round(size / _ELEMENT)) for size in reversed(timeline.nbytes))
        self._layer = _Moment()
        pauses = [later - earlier for earlier, later in itertools.pairwise([0.0, *timeline.ready])]
        for weight, pause in zip(self.weights, reversed(pauses), strict=True):
            weight.register_post_accumulate_grad_hook(_sleeps(self._layer, pause))  # before any strategy's hooks
        self._rest = timeline.seconds - (timeline.ready[-1] if timeline.ready else 0.0)

    def forward(self) -> torch.Tensor:
        """Sleep for the forward's seconds; returns 0, which depends on every parameter. No communication."""
        until = now() + self.timeline.forward
        x = _Rest.apply(torch.zeros((), requires_grad=True), self._rest)
        for weight in self.weights:
            x = _Layer.apply(x, weight, self._layer)
        sleep_until(until)
        return x


class _Moment:
    """When the layer began whose backward is under way."""

    began = 0.0


def _sleeps(layer: _Moment, pause: float) -> Callable[[torch.Tensor], None]:
    """A hook that lets a gradient be ready `pause` seconds after its layer's backward began, whatever that took."""
    return lambda _: sleep_until(layer.began + pause)


class _Layer(torch.autograd.Function):
    """Hands its input on; its weight's gradient is all ones."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, layer: _Moment) -> torch.Tensor:
        ctx.shape, ctx.layer = weight.shape, layer
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        ctx.layer.began = now()
        return grad, torch.ones(ctx.shape), None


class _Rest(torch.autograd.Function):
    """What a backward still does when the last gradient is there."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        sleep_until(now() + ctx.seconds)
        return grad, None


def scaled(timeline: Backward, factor: float) -> Backward:
    """The same timeline with every gradient `factor` times as large, each of one float32 number or more."""
    sizes: Sequence[int] = [max(_ELEMENT, _ELEMENT * round(size * factor / _ELEMENT)) for size in timeline.nbytes]
    return Backward(timeline.ready, tuple(sizes), timeline.seconds, timeline.forward)
