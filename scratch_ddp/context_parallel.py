"""Context parallelism: each rank holds a part of the sequence, and attention still sees all of it.

Ring attention: queries stay, keys and values travel from rank to rank until every rank has seen all of them.
Ulysses: heads need not know of each other, so swap tokens for heads, attend as usual, and swap back.
Everything else in a transformer treats each token by itself, and needs no communication.
"""

from functools import partial

import torch
import torch.distributed as dist
from torch.nn import functional as F

from scratch_ddp.common.agreement import together
from scratch_ddp.common.replicas import dtype_and_shape
from scratch_ddp.common.tensors import checksum, conjugate
from scratch_ddp.common.wrapper import Group, process_group

_HEADS, _TOKENS = -3, -2  # the dimensions


def zigzag_positions(tokens: int, ranks: int) -> torch.Tensor:
    """Cut the sequence into 2n pieces: rank r of n holds piece r from the start and piece r from the end.

    Returns int64 of shape (ranks, tokens / ranks): row r lists the positions of rank r, in order. Under a causal mask
    all ranks then have equally much to do. Raises ValueError unless twice the number of ranks divides `tokens`.
    """
    if tokens < 1 or tokens % (2 * ranks):
        raise ValueError(f"{tokens} tokens can't be cut into {2 * ranks} pieces: pass a multiple of {2 * ranks}")
    pieces = torch.arange(tokens).view(2 * ranks, -1)
    return torch.cat([pieces[:ranks], pieces[ranks:].flip(0)], 1)


def ring_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor, group: Group = None
) -> torch.Tensor:
    """Causal attention of this rank's queries to the keys and values of all ranks, as one process would compute it.

    `q`, `k`, `v`: (batch, heads, this rank's tokens, head size), of one floating dtype; `positions`: int64 of shape
    (ranks, tokens of a rank), the same on every rank, each position once (see `zigzag_positions`); `group`: a process
    group or a dimension of a mesh. Returns a tensor like `q`, summed in float32 or the inputs' dtype, whichever is
    wider. Parts of a block that the mask hides are left out. Raises ValueError on every rank if the inputs of any rank
    don't fit.

    Cost, with a unit of the bytes of `q`: n-1 messages of 2 units in forward, and as many in backward. Every rank must
    run the backward. Besides, one all-reduce of 24 bytes. Memory: autograd keeps the keys and values of all ranks, and
    the scores.
    """
    group = process_group(group)
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    _check("ring_attention", q, k, v, group, positions)
    wide, positions = torch.promote_types(q.dtype, torch.float32), positions.to(q.device)
    sums = q.new_zeros(*q.shape[:-1], q.shape[-1] + 1, dtype=wide)
    kv, largest = torch.stack([k, v]), torch.full_like(sums[..., :1], -torch.inf)
    for turn in range(n):
        mask = positions[rank][:, None] >= positions[(rank - turn) % n]  # the block set out so many ranks before this
        sums, largest = _add_block(sums, largest, q, kv, mask)
        if turn < n - 1:
            kv = conjugate(kv, partial(_hand_on, 1, group), partial(_hand_on, -1, group))
    return (sums[..., :-1] / sums[..., -1:]).to(q.dtype)


def _add_block(
    sums: torch.Tensor, largest: torch.Tensor, q: torch.Tensor, kv: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add the keys and values of one block to a softmax that is under way.

    `largest`: the largest score m of each query so far; `sums`: of each query Σ e^(s-m)·v and, in the last column,
    Σ e^(s-m); `mask`: (queries, keys), true where a query sees a key.
    """
    rows, columns = (mask.any(dim).nonzero()[:, 0] for dim in (1, 0))
    if not len(rows):  # add a zero that depends on kv, so that this rank, too, passes gradients on in backward
        return sums + kv[..., :0].sum(), largest
    (k, v), q = kv[..., columns, :].to(sums.dtype), q[..., rows, :].to(sums.dtype)
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~mask[rows][:, columns], -torch.inf)
    before = largest[..., rows, :]
    now = torch.maximum(before, scores.detach().amax(-1, keepdim=True))
    added = (scores - now).exp() @ F.pad(v, (0, 1), value=1.0)
    sums = sums.index_copy(-2, rows, sums[..., rows, :] * (before - now).exp() + added)
    return sums, largest.index_copy(-2, rows, now)


def _hand_on(step: int, group: dist.ProcessGroup | None, tensor: torch.Tensor) -> torch.Tensor:
    """Send to the rank `step` further on while receiving from the one `step` before."""
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    on_gpu = f"{tensor.device.type}:nccl" in dist.get_backend_config(group)  # gloo sends from main memory only
    leaving = (tensor if on_gpu else tensor.cpu()).contiguous()
    arriving = torch.empty_like(leaving)
    send = dist.P2POp(dist.isend, leaving, group=group, group_peer=(rank + step) % n)
    receive = dist.P2POp(dist.irecv, arriving, group=group, group_peer=(rank - step) % n)
    for work in dist.batch_isend_irecv([send, receive]):  # at once: if all ranks sent first, nobody would receive
        work.wait()
    return arriving.to(tensor.device)


def ulysses_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: Group = None) -> torch.Tensor:
    """Causal attention of this rank's queries to the keys and values of all ranks, as one process would compute it.

    `q`, `k`, `v`: (batch, heads, this rank's tokens, head size), of one floating dtype; rank r holds the r-th of n
    equal pieces of the sequence. Returns a tensor like `q`. Raises ValueError on every rank if the inputs of
    any rank don't fit, or if the number of ranks does not divide that of heads.

    Cost, with a unit of the bytes of `q`: two all-to-alls in forward, of 3 units and of one, and two in backward. On a
    ring of n ranks that is 4(n-1)/n units each way. Every rank must run the backward. Besides, one all-reduce of 24
    bytes.
    """
    group = process_group(group)
    _check("ulysses_attention", q, k, v, group, parts_of_heads=dist.get_world_size(group))
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


def _check(
    caller: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    group: dist.ProcessGroup | None,
    positions: torch.Tensor | None = None,
    parts_of_heads: int = 1,
) -> None:
    """Raise ValueError on every rank, before anything is sent, unless the inputs fit on each rank and to each other."""
    with together(group, complaint=f"the ranks call {caller} with different inputs") as lines:
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            if tensor.ndim != 4 or not tensor.is_floating_point():
                raise ValueError(f"{name} must be a floating tensor (batch, heads, tokens, head size)")
            if (tensor.shape, tensor.dtype) != (q.shape, q.dtype):
                raise ValueError(f"{name} is {dtype_and_shape(tensor)}, but q is {dtype_and_shape(q)}")
        trained = [torch.is_grad_enabled() and each.requires_grad for each in (q, k, v)]
        lines += [f"q, k and v: {dtype_and_shape(q)}", f"requires_grad of q, k and v: {trained}"]
        if q.shape[_HEADS] % parts_of_heads:
            raise ValueError(f"{q.shape[_HEADS]} heads can't be shared out to {parts_of_heads} ranks equally")
        if positions is not None:
            lines.append(f"positions {positions[..., :4].tolist()} … {checksum(positions)}")
            shape = (dist.get_world_size(group), q.shape[_TOKENS])
            if tuple(positions.shape) != shape or len(positions.unique()) != positions.numel():
                raise ValueError(f"positions must be {shape}, a row for each rank, each position once")
