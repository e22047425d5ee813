"""Groups that stand in for those of a rank, and in which nothing is sent; and what their calls return."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from scratch_ddp.instruments.traffic.calls import METHODS


class ConnectionLost(dist.DistNetworkError):
    """As a process group raises it when another rank has ended."""

    def __init__(self) -> None:
        super().__init__("Connection closed by peer")


class Work(dist.Work):
    """A call under way. It ends when its rank waits for it, in one of the ways that torch has: then `wait` is called.

    outputs: what its future is of.
    """

    def __init__(self, wait: Callable[[], None], outputs: Sequence[torch.Tensor] = ()):
        super().__init__()
        self._wait, self._outputs, self._has_ended = wait, list(outputs), False

    def wait(self, timeout: Any = None) -> bool:
        if not self._has_ended:
            self._wait()
            self._has_ended = True
        return True

    def is_completed(self) -> bool:
        return self.wait()

    def get_future(self) -> torch.futures.Future:
        return _Future(self._result)

    def _result(self) -> list[torch.Tensor]:
        self.wait()
        return self._outputs


class _Future(torch.futures.Future):
    """Has its result when somebody asks for it: no other thread could bring it."""

    def __init__(self, result: Callable[[], Any]):
        super().__init__()
        self._result = result

    def wait(self) -> Any:
        if not super().done():
            self.set_result(self._result())
        return super().wait()

    def value(self) -> Any:
        return self.wait()

    def done(self) -> bool:
        self.wait()
        return True

    def then(self, callback: Callable[[torch.futures.Future], Any]) -> torch.futures.Future:
        return _Future(lambda: (self.wait(), callback(self))[1])


class _NoStore:
    """In place of the store of a process group. An answer has no business there: what it writes would stay."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"the answer uses the process group's store ({name}): what it writes there would stay")


@contextlib.contextmanager
def known_to_torch(group: dist.ProcessGroup, name: str, members: Sequence[int] | None = None) -> Iterator[None]:
    """In the block, torch takes `group` for one of its own, of these global ranks; None: of ranks 0 to n-1."""
    world = dist.distributed_c10d._world
    members = range(group.size()) if members is None else members
    world.pg_group_ranks[group] = {member: rank for rank, member in enumerate(members)}
    world.pg_map[group], world.pg_names[group] = ("gloo", _NoStore()), name
    world.pg_backend_config[group] = "cpu:gloo"
    try:
        yield
    finally:
        for registry in (world.pg_group_ranks, world.pg_map, world.pg_names, world.pg_backend_config):
            del registry[group]


@contextlib.contextmanager
def messages_end_at_once() -> Iterator[None]:
    """In the block, what goes through the default group ends when it is started, and leaves the tensors as they are.

    For steps of many messages, of which it counts only when they are started and whether anybody waits for them. And
    for calls that must not be made: ranks that make them wait for nobody, and take no message for another.
    """
    world, default = dist.distributed_c10d._world, dist.group.WORLD
    group = _EndsAtOnce(default.rank(), default.size())
    with known_to_torch(group, "messages end at once"):
        world.pg_map[group], world.pg_backend_config[group] = world.pg_map[default], world.pg_backend_config[default]
        dist.distributed_c10d._update_default_pg(group)
        try:
            yield
        finally:
            dist.distributed_c10d._update_default_pg(default)


class _EndsAtOnce(dist.ProcessGroup):
    def __init__(self, rank: int, size: int):
        super().__init__(rank, size)
        self._rank, self._size = rank, size

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank


def _started(_: _EndsAtOnce, *args: Any) -> "_Ended":
    return _Ended(args[0] if args else None)


for _method in METHODS:  # as methods of the class, `traffic` sees the calls
    setattr(_EndsAtOnce, _method, functools.partialmethod(_started))


class _Ended(dist.Work):
    def __init__(self, result: Any):
        super().__init__()
        self._future: torch.futures.Future = torch.futures.Future()
        self._future.set_result(result)

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future:
        return self._future

    def _source_rank(self) -> int:
        return 0
