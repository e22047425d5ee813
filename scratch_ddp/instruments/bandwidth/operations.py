"""The operations that can be timed: torch's collectives and some of ours, with their bytes and memory.

S is the total size: of the tensor in an all-reduce, broadcast or reduce, and of all n parts together in the others.
This and the bus bandwidth factors are the definitions of NVIDIA's nccl-tests (doc/PERFORMANCE.md). The factor times S
is the least that a link must carry, so bandwidths for different numbers of ranks can be compared.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist

from scratch_ddp import collectives as ours

# torch 2.13 renamed both and warns about the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

FLOAT = 4  # bytes of a float32


class Workspace:
    """One rank's float32 tensors for all operations of one size: S bytes, S/n bytes, and for all-to-all a second S."""

    def __init__(self, size: int, group: dist.ProcessGroup, device: torch.device, second: bool):
        self.group, self.rank, self.n = group, group.rank(), group.size()
        # Filled, so that their pages exist: touching a page for the first time takes longer than a message.
        self.whole = torch.empty(size // FLOAT, device=device).fill_(0)
        self.part = torch.empty(len(self.whole) // self.n, device=device).fill_(0)
        self.second = torch.empty_like(self.whole).fill_(0) if second else None

    def even(self, tensor: torch.Tensor | None = None) -> torch.Tensor:
        """The whole tensor (or another) without the few elements that remain beside n equal parts."""
        return (self.whole if tensor is None else tensor)[: self.n * len(self.part)]

    @cached_property
    def parts(self) -> list[torch.Tensor]:
        return list(self.even().chunk(self.n))

    def parts_at(self, root: int) -> list[torch.Tensor] | None:
        return self.parts if self.rank == root else None


Run = Callable[[Workspace, int], object]  # (workspace, group rank of the root)


@dataclass(frozen=True)
class Operation:
    """A collective with its bus bandwidth factor by n, and the `extra` memory that gloo takes for it, in units of S."""

    name: str
    run: Run
    bus_factor: Callable[[int], float]
    extra: Callable[[int], float]
    in_parts: bool  # whether S is split into n equal parts
    second: bool  # whether it needs the second tensor

    def nbytes(self, size: int, n: int) -> int:
        """The S that is timed: `size` rounded down to whole float32 numbers, and to n equal parts if it has parts."""
        return size // FLOAT // n * n * FLOAT if self.in_parts else size // FLOAT * FLOAT


OPERATIONS: dict[str, Operation] = {}


def memory_needed(operations: Sequence[Operation], size: int, n: int) -> int:
    """Bytes that one rank of n needs: the workspace, and the largest `extra` of the operations."""
    second = any(each.second for each in operations)
    return round(size * (1 + 1 / n + second + max(each.extra(n) for each in operations)))


def _operation(
    bus_factor: Callable[[int], float],
    extra: Callable[[int], float] = lambda n: 0.1,
    in_parts: bool = True,
    second: bool = False,
) -> Callable[[Run], Run]:
    def register(run: Run) -> Run:
        OPERATIONS[run.__name__] = Operation(run.__name__, run, bus_factor, extra, in_parts, second)
        return run

    return register


def _twice_all_but_own(n: int) -> float:
    """Each rank sends all but one of n parts twice."""
    return 2 * (n - 1) / n


def _all_but_own(n: int) -> float:
    """Each rank sends or receives all parts but its own."""
    return (n - 1) / n


def _once(n: int) -> float:
    """The whole tensor passes each link once."""
    return 1.0


@_operation(_twice_all_but_own, in_parts=False)
def all_reduce(space: Workspace, root: int) -> None:
    """torch's all_reduce of S bytes, in place."""
    dist.all_reduce(space.whole, group=space.group)


@_operation(_twice_all_but_own, extra=lambda n: 1 / n + 0.1, in_parts=False)
def ring_all_reduce(space: Workspace, root: int) -> None:
    """Our ring over the same S bytes, in place."""
    ours.ring_all_reduce(space.whole, space.group)


@_operation(_twice_all_but_own, extra=lambda n: 1 / n + 0.1, in_parts=False)
def unchecked_ring_all_reduce(space: Workspace, root: int) -> None:
    """The same ring without comparing the ranks' calls first; torch does not compare them either."""
    with ours.unchecked():
        ours.ring_all_reduce(space.whole, space.group)


@_operation(_once, in_parts=False)
def broadcast(space: Workspace, root: int) -> None:
    """torch's broadcast of S bytes from the root."""
    dist.broadcast(space.whole, group=space.group, group_src=root)


@_operation(_once, in_parts=False)
def tree_broadcast(space: Workspace, root: int) -> None:
    """Our tree from the root, S bytes."""
    ours.tree_broadcast(space.whole, dist.get_global_rank(space.group, root), space.group)


@_operation(_once, in_parts=False)
def reduce(space: Workspace, root: int) -> None:
    """torch's reduce of S bytes to the root."""
    dist.reduce(space.whole, group=space.group, group_dst=root)


@_operation(_all_but_own, extra=lambda n: 1.1)
def all_gather(space: Workspace, root: int) -> None:
    """torch's all-gather: S/n bytes from each rank into one tensor of S bytes on every rank."""
    _all_gather(space.even(), space.part, group=space.group)


@_operation(_all_but_own)
def direct_all_gather(space: Workspace, root: int) -> None:
    """Ours: S/n bytes from each rank into n tensors, S bytes in all, on every rank."""
    ours.all_gather(space.parts, space.part, space.group)


@_operation(_all_but_own, extra=lambda n: 1.1)
def reduce_scatter(space: Workspace, root: int) -> None:
    """torch's reduce-scatter: one tensor of S bytes on every rank, S/n bytes of the sum to each."""
    _reduce_scatter(space.part, space.even(), group=space.group)


@_operation(_all_but_own, extra=lambda n: 1.1)
def direct_reduce_scatter(space: Workspace, root: int) -> None:
    """Ours: n tensors, S bytes in all, on every rank, S/n bytes of the sum to each."""
    ours.reduce_scatter(space.part, space.parts, space.group)


@_operation(_all_but_own, extra=lambda n: 1.1)
def gather(space: Workspace, root: int) -> None:
    """torch's gather: S/n bytes from each rank to the root, which then holds S bytes."""
    dist.gather(space.part, space.parts_at(root), group=space.group, group_dst=root)


@_operation(_all_but_own)
def scatter(space: Workspace, root: int) -> None:
    """torch's scatter: S/n of the root's S bytes to each rank."""
    dist.scatter(space.part, space.parts_at(root), group=space.group, group_src=root)


@_operation(_all_but_own, second=True)
def all_to_all(space: Workspace, root: int) -> None:
    """torch's all-to-all: each rank sends S/n of its S bytes to every rank."""
    dist.all_to_all_single(space.even(space.second), space.even(), group=space.group)
