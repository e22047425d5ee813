"""A backward in two halves: the gradient of a stage's input at once, the gradients of its weights later.

What can wait are the weights and biases of linear layers, which are nearly all of a transformer. The gradients of other
parameters are computed in the first half. Computing each half once costs no more than the whole; two calls of autograd
over one graph would pass through it twice.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

Later = list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]]  # input, weight, bias, gradient


class weights_put_off(TorchFunctionMode):
    """Inside, the linear layers of a forward pass put what their weights' gradients need into `later`, in backward."""

    def __init__(self, later: Later):
        super().__init__()
        self.later = later

    def __torch_function__(self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if function is torch.nn.functional.linear and not kwargs and _is_plain(*args):
            return _Linear.apply(*args[:2], args[2] if len(args) > 2 else None, self.later)
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
        x, weight, bias, gradient = later.pop()
        x, gradient = x.reshape(-1, x.shape[-1]), gradient.reshape(-1, gradient.shape[-1])
        weight.backward(gradient.T @ x)
        if bias is not None:
            bias.backward(gradient.sum(0))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, later: Later
    ) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.parameters = weight, bias  # a checkpoint would hand out copies of saved ones
        ctx.later = later
        return torch.nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:
        (x,), (weight, bias) = ctx.saved_tensors, ctx.parameters
        ctx.later.append((x.detach(), weight, bias, gradient))
        return gradient @ weight if ctx.needs_input_grad[0] else None, None, None, None
