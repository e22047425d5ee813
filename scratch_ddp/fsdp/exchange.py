"""The two collectives of sharded training, started and not waited for, under the names of this version of torch."""

import torch
import torch.distributed as dist

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def start_all_gather(message: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup | None) -> dist.Work:
    """Begin to fill row r of `message`, shape (n, part), with rank r's `part`."""
    return _all_gather(message.view(-1), part, group=group, async_op=True)


def start_reduce_scatter(part: torch.Tensor, message: torch.Tensor, group: dist.ProcessGroup | None) -> dist.Work:
    """Begin to add up the ranks' messages, shape (n, part), and to leave this rank's row of the sum in `part`."""
    return _reduce_scatter(part, message.view(-1), group=group, async_op=True)
