"""The timeline of a backward pass: when each gradient is ready to be sent."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import nn

from scratch_ddp.cost.wire import refuse_unless_finite


@dataclass(frozen=True)
class Backward:
    """When each gradient is ready, in the order of arrival, and what surrounds it.

    `ready`: seconds after the backward's start; `nbytes`: bytes of the gradient; `seconds`: the whole backward;
    `forward`: the seconds before it. Raises ValueError if a figure is negative, infinite or NaN, if times run
    backwards or past `seconds`, or if there are not as many sizes as times.
    """

    ready: tuple[float, ...]
    nbytes: tuple[int, ...]
    seconds: float
    forward: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "ready", tuple(self.ready))
        object.__setattr__(self, "nbytes", tuple(self.nbytes))
        refuse_unless_finite(seconds=self.seconds, forward=self.forward)
        for at, size in zip(self.ready, self.nbytes, strict=False):
            refuse_unless_finite(ready=at, nbytes=size)
        if len(self.ready) != len(self.nbytes):
            raise ValueError(f"{len(self.ready)} gradients are ready, but {len(self.nbytes)} sizes are given")
        if any(later < earlier for earlier, later in pairwise(self.ready)):
            raise ValueError("the gradients must stand in the order in which they are ready")
        if self.ready and self.ready[-1] > self.seconds:
            raise ValueError(f"a gradient is ready after {self.ready[-1]:g} s of a backward of {self.seconds:g} s")

    @classmethod
    def in_proportion(cls, nbytes: Sequence[int], seconds: float, forward: float = 0.0) -> "Backward":
        """A backward in which each gradient, in the order of arrival, takes time in proportion to its bytes."""
        refuse_unless_finite(seconds=seconds)
        whole = sum(nbytes)
        ready = [min(seconds, seconds * so_far / whole) if whole else seconds for so_far in accumulate(nbytes)]
        return cls(tuple(ready), tuple(nbytes), seconds, forward)

    @classmethod
    def measured(cls, model: nn.Module, loss: Callable[[], torch.Tensor]) -> "Backward":
        """Run `loss()` and its backward once, and note when each parameter of `model` has its gradient.

        Run it once before, to warm up, and without any strategy's hooks on the model. The gradients stay, added to
        those that were there. No communication. On a GPU the times are those at which Python sees the gradients.
        """
        arrived: list[tuple[float, int]] = []
        hooks = [
            parameter.register_post_accumulate_grad_hook(
                lambda each: arrived.append((time.perf_counter(), each.grad.nbytes))
            )
            for parameter in model.parameters()
            if parameter.requires_grad
        ]
        try:
            began = time.perf_counter()
            value = loss()
            turned = time.perf_counter()
            value.backward()
            ended = time.perf_counter()
        finally:
            for hook in hooks:
                hook.remove()
        ready = tuple(at - turned for at, _ in arrived)
        return cls(ready, tuple(size for _, size in arrived), ended - turned, turned - began)

    @property
    def total_bytes(self) -> int:
        """Bytes of all gradients."""
        return sum(self.nbytes)
