"""The ranks that hold a model, and the collectives between them: started now, waited for later.

A message has the shape (n, part), n being the number of ranks that share a copy: row r is rank r's part. An all-gather
fills it from the ranks' parts. A reduce-scatter adds up the ranks' messages and leaves each rank its own row of the
sum. Where there are several copies of the model, an all-reduce then adds up the sums of the ranks with the same row.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from scratch_ddp.common.accounting import counted_as
from scratch_ddp.common.wrapper import Group, process_group

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the newer names came with 2.13
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Ranks:
    """The ranks that hold a model: the `count` ranks of a `row` share a copy, of which this one has the shard `rank`.

    `group`: as of `FSDP`. On a mesh of two dimensions (HSDP) each row of ranks holds a copy in shards, and a `column`
    holds the same shard of all `copies`. Raises ValueError where `process_group` does.
    """

    def __init__(self, group: Group):
        self.column: dist.ProcessGroup | None = None
        self._mesh: DeviceMesh | None = None
        self._placements: Sequence[Placement] = [Shard(0)]
        if isinstance(group, DeviceMesh) and group.ndim == 2 and 1 not in group.shape:
            if group.get_coordinate() is None:
                raise ValueError(f"rank {dist.get_rank()} is not in the mesh: build the model on the mesh's ranks only")
            whole_world = group.size() == dist.get_world_size()
            self.everyone = None if whole_world else group._flatten().get_group()
            self.column, self.row = group.get_group(0), group.get_group(1)
            self._mesh, self._placements = group, [Replicate(), Shard(0)]
        else:
            self.everyone = self.row = process_group(group)
        self.rank, self.count = dist.get_rank(self.row), dist.get_world_size(self.row)
        self.copies = dist.get_world_size(self.column) if self.column is not None else 1
        # Process groups that wrap gloo, as those of rank cells do, report gloo as their backend too.
        self._is_gloo = dist.get_backend(self.row) == dist.Backend.GLOO

    def dtensor(self, rows: torch.Tensor, shape: Sequence[int]) -> DTensor:
        """This rank's `rows` of a tensor of this shape, cut on dim 0, as a DTensor on the same memory."""
        self._mesh = self._mesh or DeviceMesh.from_group(self.row or dist.group.WORLD, rows.device.type)
        stride = torch.empty(shape, device="meta").stride()
        whole = {"run_check": False, "shape": torch.Size(shape), "stride": stride}
        return DTensor.from_local(rows, self._mesh, self._placements, **whole)

    def all_gather(self, part: torch.Tensor) -> "Started":
        """Start to gather every rank's flat `part`, of the same size everywhere; the result is the message."""
        # gloo's allgather_coalesced could write straight into the parameters. But now and then it ends the process
        # with corrupted memory, where its thread makes views of its arguments (seen with torch 2.13, not understood).
        message = part.new_empty(self.count, part.numel())
        return Started(_all_gather(message.view(-1), part, group=self.row, async_op=True), message, part)

    def reduce_scatter(self, message: torch.Tensor) -> "Started":
        """Start to add up the ranks' messages; the result is this rank's row of the sum.

        The message is freed once the caller has dropped it and `wait` has returned.
        """
        if not message.numel():
            return Started(None, message[0], message)
        if self._is_gloo and message.device.type == "cpu":
            with counted_as("reduce_scatter", message.nbytes, self.row):
                return SumOfRows(message, self.rank, self.row)
        row = message.new_empty(message.shape[1])
        return Started(_reduce_scatter(row, message.view(-1), group=self.row, async_op=True), row, message)

    def all_reduce_over_copies(self, row: torch.Tensor) -> "Started":
        """Start to add up, in place, what the ranks with the same shard have; nothing if there is one copy."""
        work = dist.all_reduce(row, group=self.column, async_op=True) if self.copies > 1 and row.numel() else None
        return Started(work, row, row)


class Started:
    """A collective that has been started. `wait` returns its result, once."""

    def __init__(self, work: dist.Work | None, result: torch.Tensor, given: torch.Tensor):
        self._work, self._result = work, result
        self._given: torch.Tensor | None = given  # not every process group keeps it alive until it is sent

    def wait(self) -> torch.Tensor:
        if self._work is not None:
            self._work.wait()
        self._given = None
        return self._result


class SumOfRows(Started):
    """A reduce-scatter over gloo. gloo's own is an all-reduce of which each rank keeps a part: twice the bytes.

    Instead, an all-to-all brings this rank its row of every message, and the rank adds them up.
    """

    def __init__(self, message: torch.Tensor, rank: int, group: dist.ProcessGroup | None):
        count, size = message.shape
        # A rank's own row need not travel, if the others are adjacent in memory.
        leaving, self._own = message, None
        if count > 1 and rank in (0, count - 1):
            leaving, self._own = (message[1:] if rank == 0 else message[:-1]), message[rank]
        sizes = [size * (self._own is None or other != rank) for other in range(count)]
        self.rows = torch.empty_like(leaving)
        given = (self.rows.view(-1), leaving.view(-1), sizes, sizes)
        self._work = dist.all_to_all_single(*given, group=group, async_op=True)

    def wait(self) -> torch.Tensor:
        self._work.wait()
        total = self.rows.sum(dim=0)
        if self._own is not None:
            total += self._own
        self._work = self._own = self.rows = None  # they keep the message alive
        return total
