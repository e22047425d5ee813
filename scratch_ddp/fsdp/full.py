"""Whole tensors out of shards and back: one unit at a time."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from scratch_ddp.fsdp.shards import Shards


def gather_rows_of(
    shards: Shards, mine: Sequence[torch.Tensor | None], keep: bool = True
) -> dict[str, torch.Tensor | None]:
    """Return the whole tensors of which each rank has its rows, by the parameters' names; None where there are none.

    `mine`: for each parameter of the shards a tensor of its shard's shape and dtype, or None, on all ranks alike. A
    rank that does not want to `keep` them gets nothing. One all-gather, and memory for all of them twice.
    """
    sizes = [rows.whole_size(shards.world_size) for rows in shards.rows]
    wholes = shards.part.new_empty(sum(sizes)).split(sizes)
    if shards.part.numel() and any(tensor is not None for tensor in mine):
        part = torch.zeros_like(shards.part)
        for rows, tensor in zip(shards.rows, mine, strict=True):
            if tensor is not None:
                rows.shard(part, shards.rank).copy_(tensor.detach())
        message = shards.comm.all_gather(part).wait()
        for rows, whole in zip(shards.rows, wholes, strict=True):
            rows.read(message, whole)
    each = zip(shards.names, shards.rows, wholes, mine, strict=True)
    return {name: None if tensor is None else rows.values(whole).clone() for name, rows, whole, tensor in each if keep}


def spread_rows_of(shards: Shards, wholes: Mapping[str, torch.Tensor] | None) -> None:
    """Give every rank its rows of the whole tensors that the first rank has, zeros of others; elsewhere pass None.

    Costs one broadcast of all of them.
    """
    if not shards.part.numel():
        return
    message = shards.part.new_zeros(shards.world_size, shards.part.numel())
    if wholes is not None:
        for name, rows in zip(shards.names, shards.rows, strict=True):
            if name in wholes:
                rows.write(message, wholes[name].detach())
    dist.broadcast(message, group=shards.group, group_src=0)
    shards.part.copy_(message[shards.rank])
