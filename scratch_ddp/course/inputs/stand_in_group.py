"""Groups that stand in for the default group of a rank, and in which nothing is sent."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist


@contextlib.contextmanager
def as_default_group(group: dist.ProcessGroup, name: str) -> Iterator[None]:
    """In the block, torch takes `group` for the default group, of ranks 0 to n-1."""
    world, default = dist.distributed_c10d._world, dist.group.WORLD
    world.pg_group_ranks[group] = {rank: rank for rank in range(group.size())}
    world.pg_map[group], world.pg_names[group] = ("gloo", None), name
    world.pg_backend_config[group] = "cpu:gloo"
    dist.distributed_c10d._update_default_pg(group)
    try:
        yield
    finally:
        dist.distributed_c10d._update_default_pg(default)
        for registry in (world.pg_group_ranks, world.pg_map, world.pg_names, world.pg_backend_config):
            del registry[group]


@contextlib.contextmanager
def messages_end_at_once() -> Iterator[None]:
    """In the block, an all-reduce ends when it is started, and leaves the tensor as it is.

    For steps of many messages, of which it counts only when they are started and whether anybody waits for them.
    """
    default = dist.group.WORLD
    with as_default_group(_EndsAtOnce(default.rank(), default.size()), "messages end at once"):
        yield


class _EndsAtOnce(dist.ProcessGroup):
    def __init__(self, rank: int, size: int):
        super().__init__(rank, size)
        self._rank, self._size = rank, size

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    def allreduce(self, tensors: list[torch.Tensor], *_: Any) -> "_Ended":
        return _Ended(tensors)


class _Ended(dist.Work):
    def __init__(self, tensors: list[torch.Tensor]):
        super().__init__()
        self._future: torch.futures.Future = torch.futures.Future()
        self._future.set_result(tensors)

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future:
        return self._future
