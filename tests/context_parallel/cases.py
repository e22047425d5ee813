"""Attention of one process and of ranks that share the sequence, and how far apart they are."""

import torch
import torch.distributed as dist
from torch.nn import functional as F

from scratch_ddp.context_parallel import contiguous_positions, ring_attention, ulysses_attention, zigzag_positions
from scratch_ddp.instruments.traffic import traffic

BATCH, HEADS, HEAD = 2, 4, 8


def inputs(tokens, seed=0):
    """q, k, v and a gradient of the output, for the whole sequence; equal on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(BATCH, HEADS, tokens, HEAD, generator=generator, dtype=torch.float64) for _ in range(4)]


def one_process(q, k, v, gradient):
    """The output, and the gradients of q, k and v."""
    leaves = [each.clone().requires_grad_() for each in (q, k, v)]
    output = F.scaled_dot_product_attention(*leaves, is_causal=True)
    output.backward(gradient)
    return [output.detach(), *(leaf.grad for leaf in leaves)]


def attend(kind, q, k, v, positions, group=None):
    if kind == "ulysses":
        return ulysses_attention(q, k, v, group)
    return ring_attention(q, k, v, positions, group)


def compare(kind, tokens, group=None):
    """The largest error of output and gradients, and this rank's traffic in forward and in backward."""
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    positions = (zigzag_positions if kind == "zigzag" else contiguous_positions)(tokens, n)
    whole = inputs(tokens)
    *parts, gradient = [each[:, :, positions[rank]] for each in whole]
    leaves = [each.clone().requires_grad_() for each in parts]
    with traffic() as forward:
        output = attend(kind, *leaves, positions, group)
    with traffic() as backward:
        output.backward(gradient)
    found = [output.detach(), *(leaf.grad for leaf in leaves)]
    wanted = [each[:, :, positions[rank]] for each in one_process(*whole)]
    error = max((mine - right).abs().max().item() for mine, right in zip(found, wanted, strict=True))
    return error, forward, backward
