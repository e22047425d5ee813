"""What traffic is for: the core marks it here, and the instruments that count communication read the marks.

The core does not know who counts. While nobody counts, a mark costs next to nothing. A mark concerns its thread alone.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar, copy_context
from typing import Any

import torch.distributed as dist

Counter = Callable[[str, int, dist.ProcessGroup | None], None]
counters: list[Counter] = []  # called as counter(name, payload, group) for each call that `counted_as` stands for

_set_up, _part = (ContextVar(name, default=False) for name in ("set_up", "part"))


@contextlib.contextmanager
def set_up(_mark: ContextVar[bool] = _set_up) -> Iterator[None]:
    """Mark what this thread sends inside as set-up, such as checks: it is counted apart from training's traffic."""
    token = _mark.set(True)
    try:
        yield
    finally:
        _mark.reset(token)


def is_set_up() -> bool:
    """Whether this thread is inside `set_up`."""
    return _set_up.get()


@contextlib.contextmanager
def counted_as(name: str, payload: int, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Count this thread's calls inside as one call `name` of `payload` bytes: a collective made of others."""
    with set_up(_part):
        yield
    for counter in counters:
        counter(name, payload, group)


def as_part_of_a_call(function: Callable, *args: Any, **kwargs: Any) -> Any:
    """Call it; what it calls is part of a call that is counted as a whole. However it ends, the mark ends with it."""
    __tracebackhide__ = True  # rank cells show the learner's own line instead
    context = copy_context()
    context.run(_part.set, True)
    return context.run(function, *args, **kwargs)


def is_part_of_a_call() -> bool:
    """Whether this thread is inside `as_part_of_a_call` or `counted_as`."""
    return _part.get()
