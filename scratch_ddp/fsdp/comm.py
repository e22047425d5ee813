"""The collectives of sharded training: started now, waited for later; and the ranks between which they run.

A message has the shape (n, part), n being the number of ranks: row r is rank r's part. An all-gather fills it from the
ranks' parts. A reduce-scatter adds up the ranks' messages and leaves each rank its own row of the sum. Where several
groups of n ranks hold the model, an all-reduce then adds up the sums of those that hold the same row.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from scratch_ddp.common.accounting import counted_as
from scratch_ddp.common.wrapper import Group, process_group

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the newer names came with 2.13
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Pending(Protocol):
    """A collective that has been started."""

    def is_completed(self) -> bool: ...

    def wait(self) -> torch.Tensor:
        """Return the collective's result. May be called once."""


@dataclass(frozen=True)
class Ranks:
    """The ranks that hold a model. On a mesh of two dimensions (HSDP) each row holds a copy, cut into shards."""

    everyone: dist.ProcessGroup | None
    row: dist.ProcessGroup | None  # the ranks that share a copy
    column: dist.ProcessGroup | None = None  # those that hold the same shard, where there are several copies
    mesh: DeviceMesh | None = None  # of two dimensions, where there are several copies

    @classmethod
    def of(cls, group: Group) -> "Ranks":
        """The ranks meant by the argument `group` of `FSDP`. Raises ValueError where `process_group` does."""
        if not isinstance(group, DeviceMesh) or group.ndim != 2 or 1 in group.shape:
            group = process_group(group)
            return cls(group, group)
        if group.get_coordinate() is None:
            raise ValueError(f"rank {dist.get_rank()} is not in the mesh: build the model on the mesh's ranks only")
        whole_world = group.size() == dist.get_world_size()
        return cls(None if whole_world else group._flatten().get_group(), group.get_group(1), group.get_group(0), group)


class Comm:
    """The collectives between `ranks`, for tensors on one kind of device."""

    def __init__(self, ranks: Ranks, device: torch.device):
        self.group, self.column = ranks.row, ranks.column
        self.rank, self.world_size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.copies = dist.get_world_size(self.column) if self.column is not None else 1
        # Process groups that wrap gloo, as those of rank cells do, report gloo as their backend too.
        self._over_gloo = device.type == "cpu" and dist.get_backend(self.group) == dist.Backend.GLOO

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

    def all_reduce_over_copies(self, row: torch.Tensor) -> Pending:
        """Start to add up, in place, what the ranks that hold the same shard have; nothing if there is one copy."""
        work = dist.all_reduce(row, group=self.column, async_op=True) if self.copies > 1 and row.numel() else None
        return _Started(work, row, row)


class _Started:
    """One of torch's own collectives."""

    def __init__(self, work: dist.Work | None, result: torch.Tensor, given: torch.Tensor):
        self._work, self._result = work, result
        self._given: torch.Tensor | None = given  # not every process group keeps it alive until it is sent

    def is_completed(self) -> bool:
        return self._work is None or self._work.is_completed()

    def wait(self) -> torch.Tensor:
        if self._work is not None:
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
