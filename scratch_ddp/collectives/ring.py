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
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    chunks = tensor.view(-1).tensor_split(n)
    buffer = scratch_like(chunks[0])  # the first chunks are the largest
    for step in range(n - 1):  # reduce-scatter: a sum travels round, and each rank adds its own part of that chunk
        mine = chunks[(rank - step - 1) % n]
        arriving = buffer[: mine.numel()]
        send_recv(chunks[(rank - step) % n], (rank + 1) % n, arriving, (rank - 1) % n, group)
        mine += arriving
    for step in range(n - 1):  # all-gather: a complete chunk travels round, and each rank keeps it
        send_recv(chunks[(rank + 1 - step) % n], (rank + 1) % n, chunks[(rank - step) % n], (rank - 1) % n, group)
    return tensor


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
