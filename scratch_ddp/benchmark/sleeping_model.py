"""A model that only takes time: for measuring what strategies of communication cost, on any machine, at any speed.

Its forward and backward sleep as long as they are told to, and its gradients arrive one after the other at given
moments, through autograd, so that every strategy's hooks fire as they do for a real model.
"""

import itertools
from collections.abc import Sequence
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
        pauses = [later - earlier for earlier, later in itertools.pairwise([0.0, *timeline.ready])]
        self.weights = nn.ParameterList(torch.zeros(round(size / _ELEMENT)) for size in reversed(timeline.nbytes))
        self._pauses = pauses[::-1]  # in the order of the weights: the pause before each one's gradient
        self._rest = timeline.seconds - (timeline.ready[-1] if timeline.ready else 0.0)

    def forward(self) -> torch.Tensor:
        """Sleep for the forward's seconds; returns 0, which depends on every parameter. No communication."""
        sleep_until(now() + self.timeline.forward)
        x = torch.zeros((), requires_grad=True)
        x = _After.apply(x, self._rest)
        for weight, pause in zip(self.weights, self._pauses, strict=True):
            x = _Layer.apply(x, weight, pause)
        return x


class _Layer(torch.autograd.Function):
    """Hands its input on; in backward it sleeps, and then has its weight's gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, pause: float) -> torch.Tensor:
        ctx.shape, ctx.pause = weight.shape, pause
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        until = now() + ctx.pause
        weights_grad = torch.ones(ctx.shape)
        sleep_until(until)
        return grad, weights_grad, None


class _After(torch.autograd.Function):
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
