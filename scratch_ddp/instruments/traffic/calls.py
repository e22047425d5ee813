"""A call as a process group receives it: its name, its bytes, its ranks."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from scratch_ddp.instruments.cost.wire import ring_bytes

_METHODS_OF = {  # a call's name -> the group's methods for it; the operators are c10d::<method> and c10d::<method>_
    "send": "send",
    "recv": "recv recv_anysource",
    "all_reduce": "allreduce allreduce_coalesced",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "all_gather": "allgather allgather_coalesced allgather_into_tensor_coalesced _allgather_base all_gather_single "
    "all_gather_single_coalesced",
    "gather": "gather",
    "scatter": "scatter",
    "reduce_scatter": "reduce_scatter reduce_scatter_tensor_coalesced _reduce_scatter_base reduce_scatter_single "
    "reduce_scatter_single_coalesced",
    "all_to_all": "alltoall alltoall_base all_to_all_single",
    "barrier": "barrier",
}
METHODS = {method: name for name, methods in _METHODS_OF.items() for method in methods.split()}
_OUTPUT_FIRST = ("all_gather", "gather", "scatter", "reduce_scatter", "all_to_all")  # then come this rank's tensors
_FUNCTIONAL = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")


@dataclass(eq=False)
class Call:
    """One call as the group received it. `rank` and `peer` are ranks in the group, `members` its global ranks."""

    name: str
    payload: int  # bytes of this rank's input tensors; for a receive, of its buffer
    members: tuple[int, ...]
    rank: int
    peer: int | None = None  # the other end of a message (None until wait() knows it), or the root of a collective
    tag: int = 0
    kept: int | None = None  # of an all-to-all: bytes of the piece that stays on this rank; None: an n-th of all

    @property
    def sent(self) -> int:
        """Bytes that this rank sends: on a ring, or each piece of an all-to-all straight to its rank."""
        if self.kept is not None:
            return self.payload - self.kept
        return ring_bytes(self.name, self.payload, len(self.members), self.rank, self.peer)


def read_method(method: str, group: dist.ProcessGroup, values: list) -> Call:
    """Describe a call of the group's `method` with these arguments, in their order."""
    name = METHODS[method]
    peer, tag = next((value.rootRank for value in values if hasattr(value, "rootRank")), None), 0
    if name in ("send", "recv"):
        peer, tag = (None, values[1]) if method == "recv_anysource" else (values[1], values[2])
    elif name == "broadcast" and peer is None:
        peer = values[1]  # the short form: (tensor, root)
    splits = values[3] if name == "all_to_all" and method != "alltoall" else ()
    return _call(name, values, group, peer, tag, splits)


def read_operator(func: Any, args: tuple, kwargs: dict) -> Call | None:
    """Describe a call of the operator `func`, or return None if it is no collective."""
    name = _operators_name(func)
    if name is None:
        return None
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    if "process_group" in given:
        group = dist.ProcessGroup.unbox(given["process_group"])
    else:  # functional: no output is passed
        group, args = given["group_name"], (args[0], args[0])
        group = dist.distributed_c10d._resolve_process_group(group) if isinstance(group, str) else group
    root = given.get("root_rank", given.get("src", given.get("dst")))
    return _call(name, args, group, root, given.get("tag", 0), given.get("input_split_sizes", ()))


@functools.cache
def _operators_name(func: Any) -> str | None:
    space, _, operator = func._schema.name.partition("::")
    if space == "_c10d_functional":
        return next((name for name in _FUNCTIONAL if operator.startswith(name)), None)
    return METHODS.get(operator.removesuffix("_")) if space == "c10d" else None


def _call(
    name: str, values: Sequence, group: dist.ProcessGroup, peer: int | None, tag: int, splits: Sequence[int]
) -> Call:
    """splits: of an all-to-all of one tensor, how many rows go to each rank; empty if equally many."""
    tensors = () if name == "barrier" else values[name in _OUTPUT_FIRST]
    members = dist.distributed_c10d._world.pg_group_ranks.get(group) or range(group.size())
    call = Call(name, sum(tensor.nbytes for tensor in tree_leaves(tensors)), tuple(members), group.rank(), peer, tag)
    if name == "all_to_all" and not isinstance(tensors, torch.Tensor):
        call.kept = tensors[call.rank].nbytes
    elif name == "all_to_all" and splits:
        call.kept = splits[call.rank] * tensors[:1].nbytes
    return call
