"""The exchange over gloo, whose own reduce-scatter sends twice the bytes.

Its `allgather_coalesced` would save the all-gather a copy. But now and then it ends the process with corrupted memory,
where its thread makes views of what it was given (seen with torch 2.13; how, is not known).
"""

import torch
import torch.distributed as dist

from scratch_ddp.common.accounting import counted_as
from scratch_ddp.fsdp.comm import Exchange, UnderWay


def exchange_for(group: dist.ProcessGroup | None, device: torch.device) -> Exchange:
    """The exchange that suits a group. Groups that carry gloo, as those of rank cells do, have not all of its calls."""
    over_gloo = device.type == "cpu" and dist.get_backend(group) == dist.Backend.GLOO
    return GlooExchange(group) if over_gloo else Exchange(group)


class GlooExchange(Exchange):
    """Its reduce-scatter is made of what gloo does well; `traffic` counts it as what it is made for."""

    def reduce_scatter(self, message: torch.Tensor) -> UnderWay:
        """As every exchange's. gloo's own is an all-reduce of which each rank keeps a part: twice the bytes."""
        with counted_as("reduce_scatter", message.nbytes, self.group):
            return _SumOfRows(self, message)


class _SumOfRows:
    """A reduce-scatter made of an all-to-all that brings this rank its row of every message."""

    def __init__(self, exchange: Exchange, message: torch.Tensor):
        rank, (count, size) = exchange.rank, message.shape
        # A rank's own row need not travel, if the others lie side by side.
        leaving, self._own = message, None
        if count > 1 and rank in (0, count - 1):
            leaving, self._own = (message[1:] if rank == 0 else message[:-1]), message[rank]
        sizes = [size * (self._own is None or other != rank) for other in range(count)]
        self._rows = torch.empty_like(leaving)
        given = (self._rows.view(-1), leaving.view(-1), sizes, sizes)
        self._work = dist.all_to_all_single(*given, group=exchange.group, async_op=True)

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def wait(self) -> torch.Tensor:
        self._work.wait()
        total = self._rows.sum(dim=0)
        if self._own is not None:
            total += self._own
        self._work = self._own = self._rows = None  # they hold the message
        return total
