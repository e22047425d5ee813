"""The collectives that can be timed: torch's, and ours beside them.

S is the total size: of the tensor in an all-reduce, and of all n parts together in the others. This and the bus
bandwidth factors are the definitions of NVIDIA's nccl-tests (doc/PERFORMANCE.md). The factor times S is the least that
a link must carry, so bandwidths for different numbers of ranks can be compared.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from scratch_ddp import collectives as ours

# torch 2.13 renamed both and warns about the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

FLOAT = 4  # bytes of a float32


class Workspace:
    """One rank's float32 tensors for all operations of one size: S bytes, and S/n bytes."""

    def __init__(self, size: int, group: dist.ProcessGroup, device: torch.device):
        self.group, self.n = group, group.size()
        # Filled, so that their pages exist: touching a page for the first time takes longer than a message.
        self.whole = torch.empty(size // FLOAT, device=device).fill_(0)
        self.part = torch.empty(len(self.whole) // self.n, device=device).fill_(0)
        self.even = self.whole[: self.n * len(self.part)]  # without the few elements that remain beside n equal parts
        self.parts = list(self.even.chunk(self.n))

    def unchecked_ring(self) -> None:
        """Our ring without comparing the ranks' calls first; torch does not compare them either."""
        with ours.unchecked():
            ours.ring_all_reduce(self.whole, self.group)


class Operation(NamedTuple):
    """A collective, called with a workspace, and how often each rank sends all but one of n parts: twice or once."""

    run: Callable[[Workspace], object]
    times: int

    def bus_factor(self, n: int) -> float:
        """What each rank sends, in units of S."""
        return self.times * (n - 1) / n

    def nbytes(self, size: int, n: int) -> int:
        """The S that is timed: whole float32 numbers, and for a gather or scatter n equal parts of them."""
        return size // FLOAT // n * n * FLOAT if self.times == 1 else size // FLOAT * FLOAT


OPERATIONS = {  # s: the workspace
    "all_reduce": Operation(lambda s: dist.all_reduce(s.whole, group=s.group), 2),
    "ring_all_reduce": Operation(lambda s: ours.ring_all_reduce(s.whole, s.group), 2),
    "unchecked_ring_all_reduce": Operation(lambda s: s.unchecked_ring(), 2),
    "all_gather": Operation(lambda s: _all_gather(s.even, s.part, group=s.group), 1),
    "direct_all_gather": Operation(lambda s: ours.all_gather(s.parts, s.part, s.group), 1),
    "reduce_scatter": Operation(lambda s: _reduce_scatter(s.part, s.even, group=s.group), 1),
    "direct_reduce_scatter": Operation(lambda s: ours.reduce_scatter(s.part, s.parts, s.group), 1),
}
