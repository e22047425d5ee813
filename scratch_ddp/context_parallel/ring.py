"""Ring attention: queries stay, keys and values travel from rank to rank until every rank has seen all of them."""

from functools import partial

import torch
import torch.distributed as dist
from torch.nn import functional as F

from scratch_ddp.common.agreement import check_everywhere, digest
from scratch_ddp.common.conjugate import conjugate
from scratch_ddp.common.wrapper import Group, process_group
from scratch_ddp.context_parallel.inputs import describe, inputs_problem, show


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
    problem = inputs_problem(q, k, v) or _positions_problem(positions, (n, q.shape[-2]))
    lines = [] if problem else [*describe(q, k, v), _short(positions)]
    check_everywhere(problem, lines, "the ranks call ring_attention with different inputs", group)
    wide, positions = torch.promote_types(q.dtype, torch.float32), positions.to(q.device)
    sums = q.new_zeros(*q.shape[:-1], q.shape[-1] + 1, dtype=wide)
    kv, largest = torch.stack([k, v]), torch.full_like(sums[..., :1], -torch.inf)
    for turn in range(n):
        mask = positions[rank][:, None] >= positions[(rank - turn) % n]  # the block set out so many ranks before this
        sums, largest = _add_block(sums, largest, q, kv, mask)
        if turn < n - 1:
            kv = ring_shift(kv, group)
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


def ring_shift(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Return the tensor of the rank before this one; rank 0 gets that of the last. Same shape and dtype everywhere.

    Gradients travel back: in backward each rank gets that of the tensor it handed on. Nothing is checked, and every
    rank must run the backward. Cost: one message with the tensor's bytes, in forward and in backward.
    """
    return conjugate(tensor, partial(_hand_on, 1, group), partial(_hand_on, -1, group))


def _hand_on(step: int, group: dist.ProcessGroup | None, tensor: torch.Tensor) -> torch.Tensor:
    """Send to the rank `step` further on while receiving from the one `step` before."""
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    if n == 1:
        return tensor.clone()  # a rank can't send to itself
    on_gpu = f"{tensor.device.type}:nccl" in dist.get_backend_config(group)  # gloo sends from main memory only
    leaving = (tensor if on_gpu else tensor.cpu()).contiguous()
    arriving = torch.empty_like(leaving)
    send = dist.P2POp(dist.isend, leaving, group=group, group_peer=(rank + step) % n)
    receive = dist.P2POp(dist.irecv, arriving, group=group, group_peer=(rank - step) % n)
    for work in dist.batch_isend_irecv([send, receive]):  # at once: if all ranks sent first, nobody would receive
        work.wait()
    return arriving.to(tensor.device)


def _positions_problem(positions: object, shape: tuple[int, int]) -> str | None:
    fits = isinstance(positions, torch.Tensor) and positions.dtype is torch.int64 and tuple(positions.shape) == shape
    if fits and len(positions.unique()) == positions.numel():
        return None
    return f"positions must be int64 {shape}, a row for each rank, each position once, not {show(positions)}"


def _short(positions: torch.Tensor) -> str:
    number = digest([str(positions.tolist())]) % 10**6  # where the beginnings are the same
    return f"positions that begin {positions[:, :4].tolist()} (number {number})"
