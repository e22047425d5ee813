"""Models that only take time: for measuring what strategies and schedules cost, on any machine, at any speed.

Their forward and backward sleep for a given time. Gradients arrive one after the other, through autograd, so that every
strategy's hooks fire as they do for a real model. `SleepingModel` has parameters of any sizes, as for DDP;
`SleepingBlocks` has equal blocks, as for sharding; `SleepingStage` is a stage of a pipeline.
"""

import weakref
from functools import partial

import torch
from torch import nn

from scratch_ddp.instruments.cost import Backward
from scratch_ddp.instruments.network.clock import now, sleep_until, take_time

_ELEMENT = 4  # bytes of a float32


class SleepingModel(nn.Module):
    """Parameters of the sizes in `timeline`, whose gradients are ready when it says, in a backward as long as it says.

    The parameters are registered in the reverse order of the gradients, as in a real model. Sizes are rounded to whole
    float32 numbers. `model()` returns a loss; each gradient is all ones. Hooks run beside the compute, as if the
    processor only launched a GPU's work: gradients are ready in time as long as the hooks keep up.
    """

    def __init__(self, timeline: Backward):
        super().__init__()
        self.timeline = timeline
        self.weights = nn.ParameterList(torch.zeros(round(size / _ELEMENT)) for size in reversed(timeline.nbytes))

    def forward(self) -> torch.Tensor:
        """Sleep for the forward's seconds; return 0, which depends on every parameter. No communication."""
        until = now() + self.timeline.forward
        x = torch.zeros((), requires_grad=True) * 1.0
        x.register_hook(partial(self._wait, self.timeline.seconds))
        for weight, ready in zip(self.weights, reversed(self.timeline.ready), strict=True):
            x = x + weight.sum()
            x.register_hook(partial(self._wait, ready))
        sleep_until(until)
        x = x * 1.0
        x.register_hook(self._start)
        return x

    def _start(self, _: torch.Tensor) -> None:
        self._began = now()

    def _wait(self, seconds: float, _: torch.Tensor) -> None:
        sleep_until(self._began + seconds)


class SleepingBlocks(nn.Module):
    """`count` blocks that share `nbytes` of float32 parameters, and the seconds of `forward` and `backward`, evenly.

    `model()` sleeps and returns a loss; each gradient is all ones. One number belongs to no block.
    """

    def __init__(self, count: int, nbytes: int, forward: float, backward: float):
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(1))
        elements = nbytes // count // _ELEMENT
        self.blocks = nn.Sequential(*(SleepingBlock(elements, forward / count, backward / count) for _ in range(count)))

    def forward(self) -> torch.Tensor:
        return self.blocks(self.scale * 1.0).sum()


class SleepingBlock(nn.Module):
    """A layer of so many parameters, all 0, whose forward and backward take so many seconds. It returns its input."""

    def __init__(self, elements: int, forward: float, backward: float):
        super().__init__()
        self.weight, self.seconds = nn.Parameter(torch.zeros(elements)), (forward, backward)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return take_time(x + self.weight.sum(), *self.seconds)


class LiveActivations:
    """How many of the tensors given to `count` are in memory: `now`, and `most` so far."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def count(self, tensor: torch.Tensor) -> torch.Tensor:
        self.now += 1
        self.most = max(self.most, self.now)
        weakref.finalize(tensor.untyped_storage(), self._freed)
        return tensor

    def _freed(self) -> None:
        self.now -= 1


class SleepingStage(nn.Module):
    """A linear layer of width 4: sleeps `unit` seconds in forward, and as long for each half of its backward.

    It saves one activation a forward, which `live` counts.
    """

    def __init__(self, unit: float, live: LiveActivations | None = None):
        super().__init__()
        self.unit, self.live = unit, live or LiveActivations()
        self.linear = nn.Linear(4, 4, bias=False)
        self.linear.weight.register_hook(lambda _: sleep_until(now() + self.unit))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return take_time(self.linear(self.live.count(x.clone())), forward=self.unit, backward=self.unit)
