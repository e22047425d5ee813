"""How traffic is seen: every call that reaches a process group, whoever makes it, is reported to the listeners.

`torch.distributed.all_reduce`, under whatever name it was imported, ends in `group.allreduce(...)`. The first listener
wraps these methods, of `ProcessGroup` and of its subclasses in Python, for good: without listeners they cost nothing.
C++ code (DistributedDataParallel's reducer, functional collectives) calls the methods of such a subclass too, but not
those of a plain group. There its calls are operators, which a dispatch mode sees. The outermost call is the one that
counts: what a call does on its way down, to another group or as an operator, is part of it.
"""

import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from scratch_ddp.common import accounting
from scratch_ddp.instruments.traffic.calls import METHODS, Call, read_method, read_operator


class Listener(Protocol):
    def started(self, call: Call) -> None: ...
    def waited(self, call: Call) -> None: ...


_listeners: dict[int, Listener] = {}  # by id, since listeners may be equal
_watched: set[type] = set()
_open: weakref.WeakKeyDictionary[dist.Work, Call] = weakref.WeakKeyDictionary()  # calls not yet waited for
_thread = threading.local()


@contextlib.contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Report every call that any thread makes inside the block to `listener`; calls from C++, of this thread only."""
    _watch(dist.ProcessGroup, METHODS, _reported_call)
    _watch(dist.Work, ("wait",), _reported_wait)
    _listeners[id(listener)] = listener
    is_plain = any(type(group) is dist.ProcessGroup for group in list(dist.distributed_c10d._world.pg_map))
    try:
        with _Operators() if is_plain else contextlib.nullcontext():  # the mode slows every operation of torch down
            yield
    finally:
        del _listeners[id(listener)]


def in_a_call() -> bool:
    """Whether this thread is inside a call that is reported as a whole: calls from there are the library's own."""
    return getattr(_thread, "inside", False) or accounting.is_counted_as_another()


def with_subclasses(cls: type) -> Iterator[type]:
    """The class, and all that inherit from it."""
    yield cls
    for subclass in cls.__subclasses__():
        yield from with_subclasses(subclass)


def _watch(base: type, names: Any, wrap: Callable) -> None:
    for cls in set(with_subclasses(base)) - _watched:
        _watched.add(cls)
        for name in set(names) & vars(cls).keys():
            setattr(cls, name, wrap(name, vars(cls)[name]))


def _reported_call(method: str, original: Any) -> Callable:
    def call_and_report(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True  # rank cells show the learner's own line instead
        run = original.__get__(group, type(group))
        if not _listeners or in_a_call():
            return run(*args, **kwargs)
        with _inside():
            work = run(*args, **kwargs)
        call = read_method(method, group, [*args, *kwargs.values()])
        _report(call, *(["started", "waited"] if work is None else ["started"]))
        if work is not None:
            _open[work] = call
        return work

    return call_and_report


def _reported_wait(_: str, original: Any) -> Callable:
    def wait_and_report(work: dist.Work, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        result = original.__get__(work, type(work))(*args, **kwargs)
        if call := _open.pop(work, None):
            if call.name == "recv" and call.peer is None:
                call.peer = work._source_rank()
            _report(call, "waited")
        return result

    return wait_and_report


class LightMode(TorchDispatchMode):
    """A dispatch mode that keeps torch from importing its compiler at the first operation, which takes seconds."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class _Operators(LightMode):
    """Reports the collectives that C++ calls on plain groups. Their waits are in C++ too: they count as waited for."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        call = None if in_a_call() else read_operator(func, args, kwargs or {})
        if call is None:
            return func(*args, **(kwargs or {}))
        with _inside():
            result = func(*args, **(kwargs or {}))
        _report(call, "started", "waited")
        return result


@contextlib.contextmanager
def _inside() -> Iterator[None]:
    _thread.inside = True
    try:
        yield
    finally:
        _thread.inside = False


def _report(call: Call, *events: str) -> None:
    for event, listener in itertools.product(events, list(_listeners.values())):
        getattr(listener, event)(call)


def _report_counted_as(name: str, payload: int, group: dist.ProcessGroup | None) -> None:
    """A call that stands for others (`accounting.counted_as`)."""
    _report(Call(name, payload, tuple(dist.get_process_group_ranks(group)), dist.get_rank(group)), "started", "waited")


accounting.counters.append(_report_counted_as)
