"""What a sharded optimizer checks, so that a mistake on any rank is the same error on every rank.

The ranks compare one digest of lines, a line for each group's options and for each parameter: when parameters are given
with their values, at each step with their gradients. The lines themselves travel only where they differ.
"""

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import torch

from scratch_ddp.common.optimizer_steps import REDUCED
from scratch_ddp.common.replicas import dtype_and_shape, gradient_problem
from scratch_ddp.common.tensors import checksum

Groups = Sequence[Mapping[str, Any]]  # as in Optimizer.param_groups
SAMPLE = 8  # about as many elements of a gradient are compared at each step


def describe(groups: Groups, text: Callable[[torch.Tensor], str]) -> list[str]:
    """A line for each group's options and for each parameter, with its dtype, its shape and `text(parameter)`."""
    lines = []
    for number, group in enumerate(groups):
        lines.append(f"group {number} with {options_text(group) or 'no options of its own'}")
        for name, parameter in named_parameters([group]):
            frozen = "" if parameter.requires_grad else ", frozen"
            lines.append(f"{name}: {dtype_and_shape(parameter)}{frozen}, {text(parameter)}")
    return lines


def gradient_text(parameter: torch.Tensor, reduced: Container[torch.Tensor]) -> str:
    """Stands for a parameter's gradient: a few of its elements, unless it was `reduced` to its owner."""
    gradient = parameter.grad
    if parameter in reduced and (gradient is None or hasattr(gradient, REDUCED)):
        return "mean left to its owner"
    if gradient is None:
        return "no gradient"
    few = gradient.detach().reshape(-1)[:: max(1, gradient.numel() // SAMPLE)]
    return f"gradient with {checksum(few)}"


def gradients_problem(groups: Groups) -> str | None:
    """Say which gradient can't be compared or sent, or return None."""
    named = ((name, parameter.grad) for name, parameter in named_parameters(groups) if parameter.grad is not None)
    return next(filter(None, (gradient_problem(name, gradient) for name, gradient in named)), None)


def named_parameters(groups: Groups) -> list[tuple[str, torch.Tensor]]:
    """Each parameter with what messages call it: its name where `named_parameters()` was given, else its place."""
    pairs = []
    for number, group in enumerate(groups):
        places = [f"parameter {place} of group {number}" for place in range(len(group["params"]))]
        names = [repr(name) for name in group.get("param_names", ())] or places
        pairs += zip(names, group["params"], strict=True)
    return pairs


def options_text(group: Mapping[str, Any]) -> str:
    """A group's options in one line; those that mean something in this process only (functions, objects) by type."""
    options = []
    for name, value in sorted(group.items()):
        value = value.tolist() if isinstance(value, torch.Tensor) else value
        shown = value if isinstance(value, (bool, int, float, str, tuple, type(None))) else type(value).__name__
        options += [f"{name}={shown}"] if name not in ("params", "param_names") else []
    return ", ".join(options)
