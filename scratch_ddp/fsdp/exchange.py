"""The two collectives of sharded training, started and waited for later.

On most backends they are torch's all_gather_single and reduce_scatter_single. Over gloo, whose versions of these copy
everything once more or send twice the bytes, they are made of what gloo does well; `traffic` counts them alike.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from scratch_ddp.fsdp.layout import Rows
from scratch_ddp.traffic import counted_as

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the newer names came with 2.13
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class UnderWay(Protocol):
    """A collective that has been started; `wait` returns its result where that is new memory."""

    def is_completed(self) -> bool: ...
    def wait(self) -> Any: ...


def start_all_gather(
    part: torch.Tensor,
    rows: Sequence[Rows],
    wholes: Sequence[torch.Tensor],
    allocate: Callable[[], None],
    group: dist.ProcessGroup | None,
) -> UnderWay:
    """Begin to fill `wholes` (see `Rows.whole_size`), by `rows`, with every rank's `part` of a message.

    `allocate` is called when their memory is needed: at once over gloo, which fills them itself, else when the message
    is there.
    """
    if _over_gloo(part, group):
        allocate()
        count = dist.get_world_size(group)
        places = [
            [whole[r * each.size : (r + 1) * each.size] for each, whole in zip(rows, wholes, strict=True)]
            for r in range(count)
        ]
        parts = [part[each.offset : each.offset + each.size] for each in rows]
        return (group or dist.group.WORLD).allgather_coalesced(places, parts)
    return _Message(part, rows, wholes, allocate, group)


class _Message:
    """An all-gather under way, of a message that is taken apart where it is waited for."""

    def __init__(self, part, rows, wholes, allocate, group):
        self._rows, self._wholes, self._allocate = rows, wholes, allocate
        self._message = part.new_empty(dist.get_world_size(group), len(part))
        self._work = _all_gather(self._message.view(-1), part, group=group, async_op=True)

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def wait(self) -> None:
        self._work.wait()
        self._allocate()
        for rows, whole in zip(self._rows, self._wholes, strict=True):
            rows.read(self._message, whole)


def start_reduce_scatter(message: torch.Tensor, group: dist.ProcessGroup | None) -> UnderWay:
    """Begin to add up the ranks' messages, shape (n, part). `wait` returns this rank's row of the sum, shape (part,).

    The message's memory is free again when the caller has dropped it and `wait` has returned.
    """
    if not _over_gloo(message, group):
        return _RowOfSum(message, group)
    with counted_as("reduce_scatter", message.nbytes, group):
        return _SumOfRows(message, group)


class _RowOfSum:
    """A reduce-scatter under way."""

    def __init__(self, message: torch.Tensor, group: dist.ProcessGroup | None):
        self._row = message.new_empty(message.shape[1])
        self._work = _reduce_scatter(self._row, message.view(-1), group=group, async_op=True)
        self._message = message  # not all groups hold on to what they are given

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def wait(self) -> torch.Tensor:
        self._work.wait()
        self._message = None
        return self._row


class _SumOfRows:
    """A reduce-scatter under way, made of an all-to-all that brings this rank its row of every message.

    gloo's own is an all-reduce of which each rank keeps a part: twice the bytes on the wire.
    """

    def __init__(self, message: torch.Tensor, group: dist.ProcessGroup | None):
        rank, (count, size) = dist.get_rank(group), message.shape
        # A rank's own row need not travel, if the others lie side by side.
        leaving, self._own = message, None
        if count > 1 and rank in (0, count - 1):
            leaving, self._own = (message[1:] if rank == 0 else message[:-1]), message[rank]
        sizes = [size * (self._own is None or other != rank) for other in range(count)]
        self._rows = torch.empty_like(leaving)
        given = (self._rows.view(-1), leaving.view(-1), sizes, sizes)
        self._work = dist.all_to_all_single(*given, group=group, async_op=True)

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def wait(self) -> torch.Tensor:
        self._work.wait()
        total = self._rows.sum(dim=0)
        if self._own is not None:
            total += self._own
        self._work = self._own = self._rows = None  # they hold the message
        return total


def _over_gloo(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> bool:
    """True for gloo itself. Groups that carry gloo, as those of rank cells do, have not all of its calls."""
    return tensor.device.type == "cpu" and dist.get_backend(group) == dist.Backend.GLOO
