"""Gradients as they must be to be averaged over ranks, and what keeps one from it."""

from typing import NamedTuple

import torch
from torch import nn

from scratch_ddp.replicas import modules_of


class Wrapped(NamedTuple):
    """A parameter as it was when its model was wrapped."""

    name: str
    parameter: nn.Parameter
    dtype: torch.dtype
    shape: torch.Size
    device: torch.device

    def refusal(self) -> str | None:
        """Say what keeps the parameter's gradient from being averaged, or return None: nothing, or there is none."""
        name, parameter, dtype, shape, _ = self
        for then, now in ((dtype, parameter.dtype), (shape, parameter.shape)):
            if now != then:
                return _changed(name, then, now)
        gradient = parameter.grad
        if gradient is None:
            return None
        if gradient.layout != torch.strided:
            return f"the gradient of {name!r} is sparse; only dense gradients can be averaged (sparse=False)"
        if gradient.dtype != dtype:
            return f"the gradient of {name!r} is {gradient.dtype}, its parameter {dtype}: that is not supported"
        if gradient.requires_grad:
            return f"the gradient of {name!r} has a graph of its own: no double backward through a mean over ranks"
        return None

    def moved(self) -> str | None:
        """Say that the parameter is on another device than when it was wrapped, or return None."""
        now = self.parameter.device
        return _changed(self.name, f"on {self.device}", f"on {now}") if now != self.device else None


def wrapped(model: nn.Module) -> list[Wrapped]:
    """All parameters, each once, in the order of their registration."""
    return [Wrapped(name, each, each.dtype, each.shape, each.device) for name, each in model.named_parameters()]


def in_their_places(model: nn.Module) -> list[nn.Parameter | None]:
    """What stands in each place for a parameter, tied ones in several."""
    return [each for module in modules_of(model) for each in module._parameters.values()]


def _changed(name: str, *then_and_now: object) -> str:
    then, now = (tuple(each) if isinstance(each, torch.Size) else each for each in then_and_now)
    return f"{name!r} was {then} when the model was wrapped and is {now} now: wrap it again"
