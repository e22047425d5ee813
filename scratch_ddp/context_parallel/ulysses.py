"""Ulysses: heads need not know of each other, so swap tokens for heads, attend as usual, and swap back."""

from functools import partial

import torch
import torch.distributed as dist
from torch.nn import functional as F

from scratch_ddp.common.agreement import check_everywhere
from scratch_ddp.common.conjugate import conjugate
from scratch_ddp.common.wrapper import Group, process_group
from scratch_ddp.context_parallel.inputs import describe, inputs_problem

_HEADS, _TOKENS = -3, -2  # the dimensions


def ulysses_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: Group = None) -> torch.Tensor:
    """Causal attention of this rank's queries to the keys and values of all ranks, as one process would compute it.

    `q`, `k`, `v`: (batch, heads, this rank's tokens, head size), of one floating dtype; rank r holds the r-th piece of
    the sequence (`contiguous_positions`). Returns a tensor like `q`. Raises ValueError on every rank if the inputs of
    any rank don't fit, or if the number of ranks does not divide that of heads.

    Cost, with a unit of the bytes of `q`: two all-to-alls in forward, of 3 units and of one, and two in backward. On a
    ring of n ranks that is 4(n-1)/n units each way. Every rank must run the backward. Besides, one all-reduce of 24
    bytes.
    """
    group = process_group(group)
    n, problem = dist.get_world_size(group), inputs_problem(q, k, v)
    if problem is None and q.shape[_HEADS] % n:
        problem = f"{q.shape[_HEADS]} heads can't be shared out to {n} ranks equally"
    lines = [] if problem else describe(q, k, v)
    check_everywhere(problem, lines, "the ranks call ulysses_attention with different inputs", group)
    q, k, v = _exchange(torch.stack([q, k, v]), _HEADS, _TOKENS, group)
    return _exchange(F.scaled_dot_product_attention(q, k, v, is_causal=True), _TOKENS, _HEADS, group)


def _exchange(tensor: torch.Tensor, cut: int, join: int, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Cut along one dimension, a piece for each rank, and join what arrives along another. Backward goes back."""
    return conjugate(tensor, partial(_swap, cut, join, group), partial(_swap, join, cut, group))


def _swap(cut: int, join: int, group: dist.ProcessGroup | None, tensor: torch.Tensor) -> torch.Tensor:
    leaving = torch.stack(tensor.chunk(dist.get_world_size(group), cut))
    arriving = torch.empty_like(leaving)
    dist.all_to_all_single(arriving, leaving, group=group)
    return torch.cat(arriving.unbind(), join)
