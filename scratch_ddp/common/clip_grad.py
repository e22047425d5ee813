"""Gradient clipping where a rank does not hold every gradient: the norm over all ranks' gradients, then the scaling.

torch.nn.utils.clip_grad_norm_ would scale each rank's gradients by the norm of what that rank holds.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist


def total_norm(
    gradients: Iterable[torch.Tensor], norm_type: float, device: torch.device, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """Return the norm over all elements of all gradients, a float64 scalar on `device`, the same on every rank.

    A p-norm is (Σ |g|ᵖ)^(1/p): the ranks' sums of |g|ᵖ add up, but their norms don't. Each rank passes its own
    gradients, which no other rank passes. One all-reduce of one number. Raises ValueError unless `norm_type` is a
    positive number or infinity.
    """
    if not norm_type > 0:
        raise ValueError(f"norm_type is {norm_type}, should be a positive number or infinity")
    some = [each.detach() for each in gradients if each.numel()]
    norms = [torch.linalg.vector_norm(each, norm_type, dtype=torch.float64) for each in some]
    norms = torch.stack([torch.zeros((), dtype=torch.float64, device=device), *(each.to(device) for each in norms)])
    largest = norm_type == float("inf")
    total = norms.max() if largest else (norms**norm_type).sum()
    dist.all_reduce(total, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=group)
    return total if largest else total ** (1 / norm_type)


def clip_to_norm(gradients: Iterable[torch.Tensor], norm: torch.Tensor, max_norm: float) -> None:
    """Scale the gradients, whose norm is `norm`, in place so that it is at most `max_norm`. No communication."""
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0).item()
    for gradient in gradients:
        gradient.mul_(scale)
