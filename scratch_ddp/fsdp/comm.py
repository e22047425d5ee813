"""The ranks that hold a model, and the collectives between them: started now, waited for later.

A message has the shape (n, part), n being the number of ranks that share a copy: row r is rank r's part. An all-gather
fills it from the ranks' parts. A reduce-scatter adds up the ranks' messages and leaves each rank its own row of the
sum. Where there are several copies of the model, an all-reduce then adds up the sums of the ranks with the same row.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from scratch_ddp.common.accounting import counted_as
from scratch_ddp.common.tensors import all_gather_single, reduce_scatter_single
from scratch_ddp.common.wrapper import Group, process_group


class Started:
    """A collective that has been started. `wait` returns its result, once."""

    def __init__(self, work: dist.Work, result: Callable[[], torch.Tensor], *given: torch.Tensor):
        self._work, self._result = work, result
        self._given = given  # not every process group keeps it alive until it is sent

    def wait(self) -> torch.Tensor:
        self._work.wait()
        result = self._result()
        del self._work, self._result, self._given
        return result


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

    def all_gather(self, part: torch.Tensor) -> Started:
        """Start to gather every rank's flat `part`, of the same size everywhere; the result is the message."""
        # gloo's allgather_coalesced could write straight into the parameters. But now and then it ends the process
        # with corrupted memory, where its thread makes views of its arguments (seen with torch 2.13, not understood).
        message = part.new_empty(self.count, part.numel())
        work = all_gather_single(message.view(-1), part, group=self.row, async_op=True)
        return Started(work, lambda: message, part)

    def reduce_scatter(self, message: torch.Tensor) -> Started:
        """Start to add up the ranks' messages; the result is this rank's row of the sum.

        The message is freed once the caller has dropped it and `wait` has returned.
        """
        if self._is_gloo and message.device.type == "cpu":
            with counted_as("reduce_scatter", message.nbytes, self.row):
                return self._exchange_and_add(message)
        row = message.new_empty(message.shape[1])
        work = reduce_scatter_single(row, message.view(-1), group=self.row, async_op=True)
        return Started(work, lambda: row, message)

    def all_reduce_over_copies(self, row: torch.Tensor) -> Started:
        """Start to add up, in place, what the ranks with the same shard have. Only where there are several copies."""
        return Started(dist.all_reduce(row, group=self.column, async_op=True), lambda: row)

    def _exchange_and_add(self, message: torch.Tensor) -> Started:
        """A reduce-scatter for gloo, whose own is an all-reduce of which each rank keeps a part: twice the bytes.

        Instead, an all-to-all brings this rank its row of every message, and the rank adds them up.
        """
        leaving, own = message, None
        if self.count > 1 and self.rank in (0, self.count - 1):  # its own row need not travel: the others are adjacent
            leaving, own = (message[1:] if self.rank == 0 else message[:-1]), message[self.rank]
        sizes = [message.shape[1] * (own is None or other != self.rank) for other in range(self.count)]
        rows = torch.empty_like(leaving)
        given = (rows.view(-1), leaving.view(-1), sizes, sizes)

        def total() -> torch.Tensor:
            added = rows[0] if len(rows) == 1 else rows.sum(dim=0)
            return added if own is None else added.add_(own)

        return Started(dist.all_to_all_single(*given, group=self.row, async_op=True), total, leaving)
