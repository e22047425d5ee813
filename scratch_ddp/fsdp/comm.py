"""The two collectives of sharded training, started here and waited for later."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from scratch_ddp.fsdp.layout import Rows

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the newer names came with 2.13
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class UnderWay(Protocol):
    """A collective that has been started; `wait` returns its result where that is new memory."""

    def is_completed(self) -> bool: ...
    def wait(self) -> Any: ...


class Exchange:
    """What the ranks of a group send each other, on any backend: each message in one collective."""

    def __init__(self, group: dist.ProcessGroup | None):
        self.group, self.rank, self.world_size = group, dist.get_rank(group), dist.get_world_size(group)

    def all_gather(
        self,
        part: torch.Tensor,
        rows: Sequence[Rows],
        wholes: Sequence[torch.Tensor],
        allocate: Callable[[], None] = lambda: None,
    ) -> UnderWay:
        """Begin to fill the flat `wholes` (see `Rows.whole_size`) with every rank's `part`, in which `rows` lie.

        `allocate` is called when the wholes' memory is needed.
        """
        return _Gathering(self, part, rows, wholes, allocate)

    def reduce_scatter(self, message: torch.Tensor) -> UnderWay:
        """Begin to add up the ranks' messages, shape (n, part). `wait` returns this rank's row of the sum.

        The message's memory is free again when the caller has dropped it and `wait` has returned.
        """
        return _Reducing(self, message)


class _Gathering:
    """An all-gather of a message that is taken apart where it is waited for."""

    def __init__(self, exchange, part, rows, wholes, allocate):
        self._rows, self._wholes, self._allocate = rows, wholes, allocate
        self._message = part.new_empty(exchange.world_size, part.numel())
        self._work = _all_gather(self._message.view(-1), part, group=exchange.group, async_op=True)

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def wait(self) -> None:
        self._work.wait()
        self._allocate()
        for rows, whole in zip(self._rows, self._wholes, strict=True):
            rows.read(self._message, whole)


class _Reducing:
    """A reduce-scatter."""

    def __init__(self, exchange, message):
        self._row = message.new_empty(message.shape[1])
        self._work = _reduce_scatter(self._row, message.view(-1), group=exchange.group, async_op=True)
        self._message = message  # not all groups hold on to what they are given

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def wait(self) -> torch.Tensor:
        self._work.wait()
        self._message = None
        return self._row
