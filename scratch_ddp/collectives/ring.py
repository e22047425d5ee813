"""The ring: how n ranks add up S bytes when each talks to its two neighbours only."""

import torch
import torch.distributed as dist

from scratch_ddp.collectives.checked import collective
from scratch_ddp.collectives.exchange import send_recv
from scratch_ddp.collectives.scratch import scratch_like


@collective(writes="tensor")
def ring_all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Sum `tensor` over the ranks, in place, and return it. All ranks get the same bits.

    Cost: 2(n-1) messages and 2(n-1)/n·S bytes sent by each rank, which no algorithm can do
    with fewer (Patarasuk and Yuan 2009). Depth 2(n-1). Memory: S/n beside `tensor`.
    """
    chunks = tensor.view(-1).tensor_split(dist.get_world_size(group))
    ring_reduce_scatter(chunks, group)
    ring_all_gather(chunks, group)
    return tensor


# The two halves of the ring can also be called by themselves, on chunks. They check nothing.


def ring_reduce_scatter(chunks: list[torch.Tensor], group: dist.ProcessGroup | None = None) -> int:
    """Complete one chunk's sum on each rank, in place; return which: (rank + 1) % n. The others hold partial sums.

    `chunks`: n contiguous tensors, as `tensor.view(-1).tensor_split(n)` gives them, the same sizes on every rank.
    A sum travels round the ring, and each rank adds its own part of that chunk.

    Cost: n-1 messages and (n-1)/n·S bytes sent by each rank, S for all chunks together. Depth n-1.
    """
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    buffer = scratch_like(max(chunks, key=torch.numel))
    for step in range(n - 1):
        mine = chunks[(rank - step - 1) % n]
        arriving = buffer[: mine.numel()]
        send_recv(chunks[(rank - step) % n], (rank + 1) % n, arriving, (rank - 1) % n, group)
        mine += arriving
    return (rank + 1) % n


def ring_all_gather(chunks: list[torch.Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Give every rank all chunks, in place, if at first rank r holds only the right chunk (r + 1) % n.

    A complete chunk travels round the ring, and each rank keeps it.

    Cost: n-1 messages and (n-1)/n·S bytes sent by each rank, S for all chunks together. Depth n-1.
    """
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    for step in range(n - 1):
        send_recv(chunks[(rank + 1 - step) % n], (rank + 1) % n, chunks[(rank - step) % n], (rank - 1) % n, group)


@collective(writes="tensor")
def false_ring_all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """What is often published as the ring: the same steps and the same result, but whole tensors go round.

    Cost: 2(n-1) messages and 2(n-1)·S bytes sent by each rank, n times those of the ring. Depth 2(n-1).
    """
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    total, arriving = tensor.clone(), scratch_like(tensor)
    for _ in range(n - 1):  # a sum travels round, and each rank adds its tensor
        send_recv(total, (rank + 1) % n, arriving, (rank - 1) % n, group)
        total, arriving = arriving.add_(tensor), total
    if rank == 0:
        tensor.copy_(total)
    for step in range(1, n):  # every rank has a sum now; rank 0's is kept, so that all get the same bits
        send_recv(total, (rank + 1) % n, arriving, (rank - 1) % n, group)
        total, arriving = arriving, total
        if step == rank:
            tensor.copy_(total)
    return tensor
