"""A simulated processor beside the simulated link: what it computes is real, how long it takes is said."""

import torch

from scratch_ddp.cost.wire import refuse_unless_finite
from scratch_ddp.link.sleep import now, sleep_until


def take_time(tensor: torch.Tensor, forward: float, backward: float) -> torch.Tensor:
    """Return the tensor `forward` seconds later; in backward its gradient is handed on `backward` seconds later.

    Around a layer's output it makes the layer take that long (beside its own computing), on any machine, and leaves the
    processor to others meanwhile: `take_time(layer(x), 5e-3, 10e-3)`. Values and gradients are not changed. In backward
    the time passes before the layer's own gradients are computed. Time is that of the link's clock (see `sleep`): what
    one sleep was too long, the next is shorter. Raises ValueError for a time that is negative, infinite or NaN.
    """
    refuse_unless_finite(forward=forward, backward=backward)
    return _TakesTime.apply(tensor, forward, backward)


class _TakesTime(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor: torch.Tensor, forward: float, backward: float) -> torch.Tensor:
        ctx.seconds = backward
        sleep_until(now() + forward)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        sleep_until(now() + ctx.seconds)
        return gradient, None, None
