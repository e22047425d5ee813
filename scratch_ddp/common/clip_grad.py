"""The norm of gradients of which each rank holds rows."""

from collections.abc import Iterable

import torch
import torch.distributed as dist


def total_norm(
    sharded: Iterable[torch.Tensor],
    replicated: Iterable[torch.Tensor],
    norm_type: float,
    device: torch.device,
    group: dist.ProcessGroup | None,
) -> torch.Tensor:
    """Return the norm over all elements of all gradients, float64, the same on every rank.

    A p-norm is (Σ |g|ᵖ)^(1/p): the ranks' sums of |g|ᵖ add up, where their norms don't. What is replicated counts on
    the first rank alone. Costs one all-reduce of one number.
    """
    mine = [*sharded, *(replicated if dist.get_rank(group) == 0 else ())]
    norms = [
        torch.linalg.vector_norm(gradient.detach(), norm_type, dtype=torch.float64)
        for gradient in mine
        if gradient.numel()
    ]
    total = torch.zeros((), dtype=torch.float64, device=device)
    if norms:
        norms = torch.stack([norm.to(device) for norm in norms])
        total = norms.max() if norm_type == float("inf") else (norms**norm_type).sum()
    if norm_type == float("inf"):
        dist.all_reduce(total, dist.ReduceOp.MAX, group=group)
        return total
    dist.all_reduce(total, group=group)
    return total ** (1 / norm_type)
