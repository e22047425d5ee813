"""A call as a process group receives it: its name, its bytes, its ranks."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from scratch_ddp.instruments.cost.wire import ring_bytes

# A group's method -> (the call's name, the position of this rank's input tensors). The operators c10d::<method>_ take
# them at the same position.
METHODS = {
    "send": ("send", 0),
    "recv": ("recv", 0),
    "recv_anysource": ("recv", 0),
    "allreduce": ("all_reduce", 0),
    "allreduce_coalesced": ("all_reduce", 0),
    "broadcast": ("broadcast", 0),
    "reduce": ("reduce", 0),
    "allgather": ("all_gather", 1),
    "allgather_coalesced": ("all_gather", 1),
    "allgather_into_tensor_coalesced": ("all_gather", 1),
    "all_gather_single": ("all_gather", 1),
    "all_gather_single_coalesced": ("all_gather", 1),
    "_allgather_base": ("all_gather", 1),
    "gather": ("gather", 1),
    "scatter": ("scatter", 1),
    "reduce_scatter": ("reduce_scatter", 1),
    "reduce_scatter_single": ("reduce_scatter", 1),
    "reduce_scatter_single_coalesced": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", 1),
    "_reduce_scatter_base": ("reduce_scatter", 1),
    "alltoall": ("all_to_all", 1),
    "alltoall_base": ("all_to_all", 1),
    "all_to_all_single": ("all_to_all", 1),
    "barrier": ("barrier", None),
}


@dataclass(eq=False)
class Call:
    """One call as the group received it. `rank` and `peer` are ranks in the group, `members` its global ranks."""

    name: str
    payload: int  # bytes of this rank's input tensors; for a receive, of its buffer
    members: tuple[int, ...]
    rank: int
    peer: int | None = None  # the other end of a message (None until wait() knows it), or the root of a collective
    tag: int = 0
    waited: bool = False  # somebody has waited for its end
    kept: int | None = None  # of an all-to-all: bytes of the piece that stays on this rank; None: an n-th of all

    @property
    def sent(self) -> int:
        """Bytes that this rank sends: on a ring, or each piece of an all-to-all straight to its rank."""
        if self.kept is not None:
            return self.payload - self.kept
        return ring_bytes(self.name, self.payload, len(self.members), self.rank, self.peer)


def read_method(method: str, group: dist.ProcessGroup, values: list) -> Call:
    """Describe a call of the group's `method` with these arguments, in their order."""
    name, position = METHODS[method]
    peer, tag = next((value.rootRank for value in values if hasattr(value, "rootRank")), None), 0
    if name in ("send", "recv"):
        peer, tag = (None, values[1]) if method == "recv_anysource" else (values[1], values[2])
    elif name in ("broadcast", "reduce", "gather", "scatter") and peer is None:
        peer = values[1]  # the short form of broadcast: (tensor, root)
    splits = values[3] if name == "all_to_all" and method != "alltoall" else ()
    return call_on(name, () if position is None else values[position], group, peer, tag, splits)


def call_on(
    name: str, tensors: Any, group: dist.ProcessGroup, peer: int | None, tag: int, splits: Sequence[int] = ()
) -> Call:
    """A call of `name` on `group` with this rank's input `tensors`, which may be nested.

    splits: of an all-to-all of one tensor, how many of its rows go to each rank; empty if equally many.
    """
    try:
        members = tuple(dist.get_process_group_ranks(group))
    except KeyError:  # a group that torch.distributed has not registered
        members = tuple(range(group.size()))
    payload = sum(tensor.numel() * tensor.element_size() for tensor in _flat(tensors))
    call = Call(name, payload, members, group.rank(), peer, tag)
    if name == "all_to_all":
        call.kept = _kept(tensors, splits, call.rank)
    return call


def _kept(tensors: Any, splits: Sequence[int], rank: int) -> int | None:
    if not isinstance(tensors, torch.Tensor):
        return tensors[rank].nbytes
    return splits[rank] * tensors[:1].nbytes if splits else None


def _flat(tensors: Any) -> Iterable[torch.Tensor]:
    if isinstance(tensors, torch.Tensor):
        yield tensors
    else:
        for item in tensors:
            yield from _flat(item)
