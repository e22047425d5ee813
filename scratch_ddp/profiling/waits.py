"""When this rank's main thread stood still and waited for a collective or a message.

torch's profiler does not record it. Seen is waiting in Python, in `Work.wait()` of any process group, to which every
synchronous call comes as well; not what torch's DistributedDataParallel waits for inside C++.
"""

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from scratch_ddp.profiling.intervals import Interval


@contextlib.contextmanager
def noting_waits() -> Iterator[list[Interval]]:
    """Note each wait of the thread that opens the block, in seconds of time.monotonic."""
    waits: list[Interval] = []
    thread = threading.get_ident()
    originals = [(cls, vars(cls)["wait"]) for cls in _with_subclasses(dist.Work) if "wait" in vars(cls)]
    for cls, original in originals:
        cls.wait = _noted(original, waits, thread)
    try:
        yield waits
    finally:
        for cls, original in originals:
            cls.wait = original


def _noted(original: Any, waits: list[Interval], thread: int) -> Callable[..., bool]:
    @functools.wraps(original)
    def wait(work: dist.Work, *args: Any, **kwargs: Any) -> bool:
        __tracebackhide__ = True
        began = time.monotonic()
        try:
            return original.__get__(work, type(work))(*args, **kwargs)
        finally:
            if threading.get_ident() == thread:
                while waits and waits[-1][0] >= began:
                    waits.pop()  # one group's wait inside another's
                waits.append((began, time.monotonic()))

    return wait


def _with_subclasses(cls: type) -> Iterator[type]:
    yield cls
    for subclass in cls.__subclasses__():
        yield from _with_subclasses(subclass)
