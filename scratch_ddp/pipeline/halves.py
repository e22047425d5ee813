"""A backward in two halves: the gradient of a stage's input at once, the gradients of its weights later.

What can wait are the weights and biases of linear layers, which are nearly all of a transformer. The gradients of other
parameters are computed in the first half. Two calls of autograd over one graph would pass through it twice.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

Parameters = tuple[torch.Tensor | None, ...]  # weight and bias, if there is one
Later = list[tuple[torch.Tensor, Parameters, torch.Tensor]]  # input, parameters, gradient of the output


class weights_put_off(TorchFunctionMode):
    """Inside, the linear layers of a forward pass put what their weights' gradients need into `later`, in backward."""

    def __init__(self, later: Later):
        super().__init__()
        self.later = later

    def __torch_function__(self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if function is torch.nn.functional.linear and not kwargs and _is_plain(*args):
            x, *parameters = args
            wanted = x.requires_grad
            x = x if wanted else x.detach().requires_grad_()  # so that the backward comes by
            return _Linear.apply(x, tuple(parameters), self.later, wanted)
        return function(*args, **(kwargs or {}))


def backward_of_inputs(y: torch.Tensor, gradient: torch.Tensor | None, later: Later) -> None:
    """The first half of a backward from `y`, the output of a forward inside `weights_put_off(later)`."""
    gradient = torch.ones_like(y) if gradient is None else gradient
    with weights_put_off(later):  # for checkpoints, which run their forward again
        # torch.autograd.backward itself would leave the mode before it begins.
        engine = torch.autograd.Variable._execution_engine
        engine.run_backward((y,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True)


def _is_plain(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> bool:
    """Whether the gradients of weight and bias can be computed apart. Under autocast x is cast inside the call."""
    leaves = all(each is None or (each.is_leaf and each.requires_grad) for each in (weight, bias))
    return leaves and torch.is_grad_enabled() and not torch.is_autocast_enabled(x.device.type)


def compute_weight_gradients(later: Later) -> None:
    """Add the gradients that were put off to `.grad`, as a backward does: the parameters' hooks are called."""
    while later:
        x, (weight, *bias), gradient = later.pop()
        x, gradient = x.reshape(-1, x.shape[-1]), gradient.reshape(-1, gradient.shape[-1])
        weight.backward(gradient.T @ x)
        for each in bias:
            if each is not None:
                each.backward(gradient.sum(0))


class _Linear(torch.autograd.Function):
    """Autograd sees the input alone: it would call the hooks of weights without a gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, parameters: Parameters, later: Later, wanted: bool) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.parameters, ctx.later, ctx.wanted = parameters, later, wanted
        return torch.nn.functional.linear(x, *parameters)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:
        (x,) = ctx.saved_tensors
        ctx.later.append((x.detach(), ctx.parameters, gradient))
        return gradient @ ctx.parameters[0] if ctx.wanted else None, None, None, None
