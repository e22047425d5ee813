"""One rank's values to all, and all ranks' sum to one: as a star, and as a tree."""

import torch
import torch.distributed as dist

from scratch_ddp.collectives.checked import collective


@collective(writes="tensor", root="src")
def star_broadcast(tensor: torch.Tensor, src: int = 0, group: dist.ProcessGroup | None = None) -> None:
    """Leave src's values in `tensor` on every rank: src sends to one after the other.

    Cost: n-1 messages, all sent by src: (n-1)·S bytes there. Depth n-1.
    """
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    root = dist.get_group_rank(group, src)
    if rank != root:
        dist.recv(tensor, group=group, group_src=root)
        return
    for other in range(n):
        if other != root:
            dist.send(tensor, group=group, group_dst=other)


@collective(writes="tensor", root="src")
def tree_broadcast(
    tensor: torch.Tensor,
    src: int = 0,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Leave src's values in `tensor` on every rank. Whoever has them helps to spread.

    `tensor` is contiguous. Messages stay in `group`.
    Cost: n-1 messages, at most ⌈log2 n⌉ of them sent by one rank. Depth ⌈log2 n⌉.
    """
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    root = dist.get_group_rank(group or dist.group.WORLD, src)
    # Who has the values, and who gets them next?
    place = (rank - root) % n  # the source stands at place 0, the others behind it in a circle
    reach = 1  # places 0 … reach-1 have the values
    while reach < n:
        if place < reach and place + reach < n:
            dist.send(tensor, group=group, group_dst=(rank + reach) % n)
        elif reach <= place < 2 * reach:
            dist.recv(tensor, group=group, group_src=(rank - reach) % n)
        reach *= 2
    # end of the answer


@collective(writes="tensor", root="dst")
def reduce(
    tensor: torch.Tensor,
    dst: int = 0,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Leave the sum of all ranks' tensors in `tensor` on rank dst. Others keep theirs.

    Messages stay in `group`. Memory: at most twice the elements of `tensor` beside it.
    (A name keeps its tensor until it is given another.)
    Cost: n-1 messages, at most one sent by a rank. Depth ⌈log2 n⌉.
    """
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    root = dist.get_group_rank(group or dist.group.WORLD, dst)
    # In each round about half of those that hold a sum send it on and are done.
    # Where does a rank that receives put what arrives?
    place = (rank - root) % n  # dst stands at place 0
    total = tensor
    reach = 1  # places that are multiples of reach hold the sum of the reach places from theirs on
    while reach < n and place % reach == 0:
        if place % (2 * reach) == reach:
            dist.send(total, group=group, group_dst=(rank - reach) % n)
        elif place + reach < n:
            arriving = torch.empty_like(tensor)
            dist.recv(arriving, group=group, group_src=(rank + reach) % n)
            total = arriving.add_(total)  # not into `tensor`: it belongs to the caller
        reach *= 2
    if rank == root:
        tensor.copy_(total)
