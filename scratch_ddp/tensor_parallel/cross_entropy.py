"""Cross-entropy of logits that are sliced along the vocabulary: no rank ever holds a whole row of them.

    loss of a token = log Σ exp(logit) - logit of the target

The largest logit, which keeps exp from overflowing, and the two terms are one number a token each; these travel. The
gradient, softmax - 1 at the target, is computed slice by slice without communication.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from scratch_ddp.common.wrapper import Group, process_group
from scratch_ddp.tensor_parallel.moves import own_ids


def vocabulary_parallel_cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    group: Group = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> torch.Tensor:
    """Return what torch.nn.functional.cross_entropy returns for whole logits: a scalar, the same on every rank.

    `logits`: this rank's slice (…, vocabulary / n), floating-point; half precision is computed in float32. `targets`:
    (…), int64, ids of the whole vocabulary or `ignore_index`, the same on every rank; others raise, as in one process.
    `reduction`: "mean" or "sum". Cost: one all-reduce of a number a token, and one of two. None in backward.
    """
    group = process_group(group)
    if logits.shape[:-1] != targets.shape:
        raise ValueError(f"logits of shape {tuple(logits.shape)} don't fit targets of shape {tuple(targets.shape)}")
    logits = logits.flatten(0, -2).to(torch.promote_types(logits.dtype, torch.float32))
    ignored = targets.flatten() == ignore_index
    losses = _CrossEntropy.apply(logits, targets.flatten().masked_fill(ignored, 0), group).masked_fill(ignored, 0)
    return losses.sum() / (~ignored).sum() if reduction == "mean" else losses.sum()


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        largest = logits.amax(1)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        exps = logits - largest[:, None]
        here, others = own_ids(targets, logits.shape[1], group)
        here = here[:, None]
        terms = torch.stack([exps.gather(1, here)[:, 0].masked_fill(others, 0), exps.exp_().sum(1)])
        dist.all_reduce(terms, group=group)
        ctx.save_for_backward(exps.div_(terms[1, :, None]), here, others)
        return terms[1].log() - terms[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:
        softmax, here, others = ctx.saved_tensors
        logits = softmax * gradient[:, None]
        return logits.scatter_add_(1, here, -gradient.masked_fill(others, 0)[:, None]), None, None
