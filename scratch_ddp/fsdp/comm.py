"""The two collectives of sharded training: started now, waited for later.

A message has the shape (n, part), n being the number of ranks: row r is rank r's part. An all-gather fills it from the
ranks' parts. A reduce-scatter adds up the ranks' messages and leaves each rank its own row of the sum.
"""

from typing import Protocol

import torch
import torch.distributed as dist

from scratch_ddp.common.accounting import counted_as

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the newer names came with 2.13
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Pending(Protocol):
    """A collective that has been started."""

    def is_completed(self) -> bool: ...

    def wait(self) -> torch.Tensor:
        """Return the collective's result. May be called once."""


class Comm:
    """The collectives of a group of ranks, for tensors on one kind of device."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device):
        self.group, self.rank, self.world_size = group, dist.get_rank(group), dist.get_world_size(group)
        # Process groups that wrap gloo, as those of rank cells do, report gloo as their backend too.
        self._over_gloo = device.type == "cpu" and dist.get_backend(group) == dist.Backend.GLOO

    def all_gather(self, part: torch.Tensor) -> Pending:
        """Start to gather every rank's flat `part`, of the same size everywhere; the result is the message."""
        # gloo's allgather_coalesced could write straight into the parameters. But now and then it ends the process
        # with corrupted memory, where its thread makes views of its arguments (seen with torch 2.13, not understood).
        message = part.new_empty(self.world_size, part.numel())
        return _Started(_all_gather(message.view(-1), part, group=self.group, async_op=True), message, part)

    def reduce_scatter(self, message: torch.Tensor) -> Pending:
        """Start to add up the ranks' messages; the result is this rank's row of the sum.

        The message is freed once the caller has dropped it and `wait` has returned.
        """
        if self._over_gloo:
            with counted_as("reduce_scatter", message.nbytes, self.group):
                return _SumOfRows(self, message)
        row = message.new_empty(message.shape[1])
        return _Started(_reduce_scatter(row, message.view(-1), group=self.group, async_op=True), row, message)


class _Started:
    """One of torch's own collectives."""

    def __init__(self, work: dist.Work, result: torch.Tensor, given: torch.Tensor):
        self._work, self._result = work, result
        self._given: torch.Tensor | None = given  # not every process group keeps it alive until it is sent

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def wait(self) -> torch.Tensor:
        self._work.wait()
        self._given = None
        return self._result


class _SumOfRows:
    """A reduce-scatter over gloo. gloo's own is an all-reduce of which each rank keeps a part: twice the bytes.

    Instead, an all-to-all brings this rank its row of every message, and the rank adds them up.
    """

    def __init__(self, comm: Comm, message: torch.Tensor):
        rank, (count, size) = comm.rank, message.shape
        # A rank's own row need not travel, if the others are adjacent in memory.
        leaving, self._own = message, None
        if count > 1 and rank in (0, count - 1):
            leaving, self._own = (message[1:] if rank == 0 else message[:-1]), message[rank]
        sizes = [size * (self._own is None or other != rank) for other in range(count)]
        self._rows = torch.empty_like(leaving)
        given = (self._rows.view(-1), leaving.view(-1), sizes, sizes)
        self._work = dist.all_to_all_single(*given, group=comm.group, async_op=True)

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def wait(self) -> torch.Tensor:
        self._work.wait()
        total = self._rows.sum(dim=0)
        if self._own is not None:
            total += self._own
        self._work = self._own = self._rows = None  # they keep the message alive
        return total
