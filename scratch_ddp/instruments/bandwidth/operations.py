"""The operations that can be timed: torch's collectives and some of ours.

S is the total size: of the tensor in an all-reduce, broadcast or reduce, and of all n parts together in the others.
This and the bus bandwidth factors are the definitions of NVIDIA's nccl-tests (doc/PERFORMANCE.md). The factor times S
is the least that a link must carry, so bandwidths for different numbers of ranks can be compared.
"""

from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple

import torch
import torch.distributed as dist

from scratch_ddp import collectives as ours

# torch 2.13 renamed both and warns about the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

FLOAT = 4  # bytes of a float32


class Workspace:
    """One rank's float32 tensors for all operations of one size: S bytes, S/n bytes, and for all-to-all a second S."""

    def __init__(self, size: int, group: dist.ProcessGroup, device: torch.device):
        self.group, self.rank, self.n = group, group.rank(), group.size()
        # Filled, so that their pages exist: touching a page for the first time takes longer than a message.
        self.whole = torch.empty(size // FLOAT, device=device).fill_(0)
        self.part = torch.empty(len(self.whole) // self.n, device=device).fill_(0)

    @cached_property
    def even(self) -> torch.Tensor:
        """The whole tensor without the few elements that remain beside n equal parts."""
        return self.whole[: self.n * len(self.part)]

    @cached_property
    def second(self) -> torch.Tensor:
        return torch.zeros_like(self.even)

    @cached_property
    def parts(self) -> list[torch.Tensor]:
        return list(self.even.chunk(self.n))

    def parts_at(self, root: int) -> list[torch.Tensor] | None:
        return self.parts if self.rank == root else None

    def unchecked_ring(self) -> None:
        """Our ring without comparing the ranks' calls first; torch does not compare them either."""
        with ours.unchecked():
            ours.ring_all_reduce(self.whole, self.group)


class Operation(NamedTuple):
    """A collective, called with a workspace and the root's rank in the group, and what its bytes are."""

    run: Callable[[Workspace, int], object]
    bus_factor: Callable[[int], float]  # of n
    in_parts: bool = True  # whether S is split into n equal parts

    def nbytes(self, size: int, n: int) -> int:
        """The S that is timed: `size` rounded down to whole float32 numbers, and to n equal parts if it has parts."""
        return size // FLOAT // n * n * FLOAT if self.in_parts else size // FLOAT * FLOAT


def _twice(n: int) -> float:
    """Each rank sends all but one of n parts twice."""
    return 2 * (n - 1) / n


def _all_but_own(n: int) -> float:
    """Each rank sends or receives all parts but its own."""
    return (n - 1) / n


def _once(n: int) -> float:
    """The whole tensor passes each link once."""
    return 1.0


OPERATIONS = {  # s: the workspace
    "all_reduce": Operation(lambda s, root: dist.all_reduce(s.whole, group=s.group), _twice, in_parts=False),
    "ring_all_reduce": Operation(lambda s, root: ours.ring_all_reduce(s.whole, s.group), _twice, in_parts=False),
    "unchecked_ring_all_reduce": Operation(lambda s, root: s.unchecked_ring(), _twice, in_parts=False),
    "broadcast": Operation(
        lambda s, root: dist.broadcast(s.whole, group=s.group, group_src=root), _once, in_parts=False
    ),
    "tree_broadcast": Operation(
        lambda s, root: ours.tree_broadcast(s.whole, dist.get_global_rank(s.group, root), s.group),
        _once,
        in_parts=False,
    ),
    "reduce": Operation(lambda s, root: dist.reduce(s.whole, group=s.group, group_dst=root), _once, in_parts=False),
    "all_gather": Operation(lambda s, root: _all_gather(s.even, s.part, group=s.group), _all_but_own),
    "direct_all_gather": Operation(lambda s, root: ours.all_gather(s.parts, s.part, s.group), _all_but_own),
    "reduce_scatter": Operation(lambda s, root: _reduce_scatter(s.part, s.even, group=s.group), _all_but_own),
    "direct_reduce_scatter": Operation(lambda s, root: ours.reduce_scatter(s.part, s.parts, s.group), _all_but_own),
    "gather": Operation(
        lambda s, root: dist.gather(s.part, s.parts_at(root), group=s.group, group_dst=root), _all_but_own
    ),
    "scatter": Operation(
        lambda s, root: dist.scatter(s.part, s.parts_at(root), group=s.group, group_src=root), _all_but_own
    ),
    "all_to_all": Operation(lambda s, root: dist.all_to_all_single(s.second, s.even, group=s.group), _all_but_own),
}
