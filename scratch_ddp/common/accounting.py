"""What traffic is for: the core marks it here, and the instruments that count communication read the marks.

The core does not know who counts. While nobody counts, a mark costs next to nothing.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator

import torch.distributed as dist

Counter = Callable[[str, int, dist.ProcessGroup | None], None]
counters: list[Counter] = []  # called as counter(name, payload, group) for each call that `counted_as` stands for


class _Marks(threading.local):
    set_up = 0  # how many `set_up` blocks this thread is in
    counted_as = 0  # how many `counted_as` blocks


_marks = _Marks()


@contextlib.contextmanager
def set_up() -> Iterator[None]:
    """Mark what this thread sends inside as set-up, such as checks: it is counted apart from training's traffic."""
    _marks.set_up += 1
    try:
        yield
    finally:
        _marks.set_up -= 1


def is_set_up() -> bool:
    """Whether this thread is inside `set_up`."""
    return _marks.set_up > 0


@contextlib.contextmanager
def counted_as(name: str, payload: int, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Count this thread's calls inside as one call `name` of `payload` bytes: a collective made of others."""
    _marks.counted_as += 1
    try:
        yield
    finally:
        _marks.counted_as -= 1
    for counter in counters:
        counter(name, payload, group)


def is_counted_as_another() -> bool:
    """Whether this thread is inside `counted_as`: its calls are then parts of a call that is counted as a whole."""
    return _marks.counted_as > 0
