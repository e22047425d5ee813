"""Communication that autograd can pass through: what a collective does in forward, its conjugate undoes in backward."""

from collections.abc import Callable

import torch
from torch.autograd.function import once_differentiable

Move = Callable[[torch.Tensor], torch.Tensor]


def conjugate(tensor: torch.Tensor, forward: Move, backward: Move) -> torch.Tensor:
    """Return `forward(tensor)`; its gradient is `backward(gradient)`.

    Both may communicate, so every rank must call this alike and run the backward. A second derivative raises
    RuntimeError.
    """
    return _Conjugate.apply(tensor, forward, backward)


class _Conjugate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, forward, backward):
        ctx.backward_move = backward
        return forward(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        return ctx.backward_move(gradient), None, None
