"""A call as a process group receives it: its name, its bytes, its ranks."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from scratch_ddp.instruments.cost.wire import ring_bytes

_NAMES = ("send", "recv", "all_reduce", "broadcast", "reduce_scatter", "reduce", "all_gather", "gather", "scatter")
_NAMES += ("all_to_all", "barrier")
_OUTPUT_FIRST = ("all_gather", "gather", "scatter", "reduce_scatter", "all_to_all")  # then come this rank's tensors


def _name_of(method: str) -> str | None:
    """The call that a group's method or an operator makes: `_allgather_base` and `all_gather_single` are all_gather."""
    letters = method.replace("_", "")
    return next((name for name in _NAMES if letters.startswith(name.replace("_", ""))), None)


METHODS = {method: name for method in dir(dist.ProcessGroup) if (name := _name_of(method))}  # of a process group


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
    return _name_of(operator) if space in ("c10d", "_c10d_functional") else None


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
