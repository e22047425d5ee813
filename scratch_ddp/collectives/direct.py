"""Collectives in which each message goes straight to the rank that it is for, all of them at the same time."""

import torch
import torch.distributed as dist

from scratch_ddp.collectives.checked import collective
from scratch_ddp.collectives.exchange import exchange
from scratch_ddp.collectives.scratch import scratch_like

Tensors = list[torch.Tensor]


@collective(writes="gather_list", reads="tensor", root="dst")
def gather(
    tensor: torch.Tensor, gather_list: Tensors | None = None, dst: int = 0, group: dist.ProcessGroup | None = None
) -> None:
    """Leave every rank's tensor in `gather_list` on rank dst, in the order of the ranks; elsewhere it is None.

    Cost: n-1 messages, S bytes sent by each rank but dst, which receives (n-1)·S. Depth 1.
    """
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    root = dist.get_group_rank(group, dst)
    if rank != root:
        dist.send(tensor, group=group, group_dst=root)
        return
    gather_list[rank].copy_(tensor)
    exchange({}, {other: gather_list[other] for other in _others(rank, n)}, group)


@collective(writes="tensor", reads="scatter_list", root="src")
def scatter(
    tensor: torch.Tensor, scatter_list: Tensors | None = None, src: int = 0, group: dist.ProcessGroup | None = None
) -> None:
    """Leave in `tensor` on rank i the i-th tensor of src's `scatter_list`; elsewhere the list is None.

    Cost: n-1 messages, all sent by src: (n-1)·S bytes there. Depth 1.
    """
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    root = dist.get_group_rank(group, src)
    if rank != root:
        dist.recv(tensor, group=group, group_src=root)
        return
    exchange({other: scatter_list[other] for other in _others(rank, n)}, {}, group)
    tensor.copy_(scatter_list[rank])  # last: `tensor` may be one of the list


@collective(writes="tensor_list", reads="tensor")
def all_gather(tensor_list: Tensors, tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Leave every rank's tensor in `tensor_list` on every rank. `tensor` may be this rank's place in the list.

    Cost: n·(n-1) messages, (n-1)·S bytes sent by each rank. Depth 1.
    """
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    others = _others(rank, n)
    exchange(dict.fromkeys(others, tensor), {other: tensor_list[other] for other in others}, group)
    if tensor.data_ptr() != tensor_list[rank].data_ptr():
        tensor_list[rank].copy_(tensor)


@collective(writes="output", reads="input_list", sums=True)
def reduce_scatter(output: torch.Tensor, input_list: Tensors, group: dist.ProcessGroup | None = None) -> None:
    """Leave in `output` on rank i the sum of the i-th tensors of all ranks' lists.

    Cost: n·(n-1) messages, (n-1)·S bytes sent by each rank. Depth 1. Memory: (n-1)·S beside the arguments.
    """
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    arriving = {other: scratch_like(output, place=other) for other in _others(rank, n)}
    exchange({other: input_list[other] for other in arriving}, arriving, group)
    total = input_list[rank]
    for part in arriving.values():
        total = torch.add(total, part, out=output)  # at first it reads the input, which saves a copy
    if n == 1:
        output.copy_(total)


@collective(writes="output_list", reads="input_list")
def all_to_all(output_list: Tensors, input_list: Tensors, group: dist.ProcessGroup | None = None) -> None:
    """Leave in `output_list[j]` on rank i what rank j has in `input_list[i]`. All tensors have one shape.

    Cost: n·(n-1) messages, (n-1)·S bytes sent by each rank. Depth 1.
    """
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    others = _others(rank, n)
    exchange({other: input_list[other] for other in others}, {other: output_list[other] for other in others}, group)
    output_list[rank].copy_(input_list[rank])


def _others(rank: int, n: int) -> list[int]:
    """The other ranks, starting behind this one, so that not all ranks begin with rank 0."""
    return [(rank + step) % n for step in range(1, n)]
