"""A model of blocks that only take time, for measuring how a sharded model hides its communication."""

from typing import Any

import torch
from torch import nn

from scratch_ddp.link.sleep import now, sleep_until


class SleepingBlocks(nn.Module):
    """`count` blocks that share `nbytes` of float32 parameters, and seconds of `forward` and `backward`, evenly.

    `model()` returns a loss; each gradient is all ones. One number belongs to no block.
    """

    def __init__(self, count: int, nbytes: int, forward: float, backward: float):
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(1))
        self.blocks = nn.ModuleList(
            _Block(nbytes // count // 4, forward / count, backward / count) for _ in range(count)
        )

    def forward(self) -> torch.Tensor:
        """Sleep for the forward's seconds; returns 0, which depends on every parameter. No communication."""
        x = self.scale * 1.0
        for block in self.blocks:
            x = block(x)
        return x.sum()


class _Block(nn.Module):
    def __init__(self, elements: int, forward: float, backward: float):
        super().__init__()
        self.weight, self.seconds = nn.Parameter(torch.zeros(elements)), (forward, backward)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Sleep.apply(x, self.weight, *self.seconds)


class _Sleep(torch.autograd.Function):
    """Hands its input on after a while, in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, forward: float, backward: float) -> torch.Tensor:
        ctx.shape, ctx.backward_seconds = weight.shape, backward
        sleep_until(now() + forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        sleep_until(now() + ctx.backward_seconds)
        return grad, torch.ones(ctx.shape), None, None
