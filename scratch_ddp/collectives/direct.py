"""Collectives in which each message goes straight to the rank that it is for, all of them at the same time."""

import torch
import torch.distributed as dist

from scratch_ddp.collectives.checked import collective
from scratch_ddp.collectives.exchange import exchange
from scratch_ddp.collectives.scratch import scratch_like

Tensors = list[torch.Tensor]


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


@collective(writes="output", reads="input_list")
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


def _others(rank: int, n: int) -> list[int]:
    """The other ranks, starting behind this one, so that not all ranks begin with rank 0."""
    return [(rank + step) % n for step in range(1, n)]
