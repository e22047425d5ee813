"""How traffic is seen: every call that reaches a process group, whoever makes it, is reported to the listeners.

`torch.distributed.all_reduce`, under whatever name it was imported, ends in `group.allreduce(...)`. The first listener
wraps these methods, of `ProcessGroup` and of its subclasses in Python, for good. C++ code (DistributedDataParallel's
reducer, functional collectives) calls the methods of such a subclass too, but not those of a plain group. There its
calls are operators, which a dispatch mode sees. The outermost call counts: what it does on its way down is part of it.
"""

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from scratch_ddp.common import accounting
from scratch_ddp.instruments.traffic.calls import METHODS, Call, read_method, read_operator

_listeners: dict[int, Any] = {}  # with the methods `started` and `waited`; by id, since listeners may be equal
_watched: set[type] = set()
_open: weakref.WeakKeyDictionary[dist.Work, Call] = weakref.WeakKeyDictionary()  # calls not yet waited for
_thread = threading.local()


@contextlib.contextmanager
def listening(listener: Any) -> Iterator[None]:
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


@contextlib.contextmanager
def waits_recorded() -> Iterator[list[tuple[float, float]]]:
    """List each `Work.wait()` of this thread inside the block as (start, end) in seconds of time.monotonic."""
    _watch(dist.Work, ("wait",), _reported_wait)
    _thread.waits = []
    try:
        yield _thread.waits
    finally:
        del _thread.waits


def in_a_call() -> bool:
    """Whether this thread is inside a call that is reported as a whole: calls from there are the library's own."""
    return getattr(_thread, "inside", False) or accounting.is_counted_as_another()


def _watch(base: type, names: Any, wrap: Callable) -> None:
    """Wrap these methods of a class, and of all that inherit from it."""
    for subclass in base.__subclasses__():
        _watch(subclass, names, wrap)
    if base not in _watched:
        _watched.add(base)
        for name in set(names) & vars(base).keys():
            setattr(base, name, wrap(name, vars(base)[name]))


def _reported_call(method: str, original: Any) -> Callable:
    def call_and_report(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True  # rank cells show the learner's own line instead
        run = original.__get__(group, type(group))
        if not _listeners or in_a_call():
            return run(*args, **kwargs)
        with _inside():
            work = run(*args, **kwargs)
        call = read_method(method, group, [*args, *kwargs.values()])
        _report(call, at_once=work is None)
        if work is not None:
            _open[work] = call
        return work

    return call_and_report


def _reported_wait(_: str, original: Any) -> Callable:
    def wait_and_report(work: dist.Work, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        began = time.monotonic()
        try:
            result = original.__get__(work, type(work))(*args, **kwargs)
        finally:
            getattr(_thread, "waits", []).append((began, time.monotonic()))
        if call := _open.pop(work, None):
            if call.name == "recv" and call.peer is None:
                call.peer = work._source_rank()
            for listener in list(_listeners.values()):
                listener.waited(call)
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
        _report(call, at_once=True)
        return result


@contextlib.contextmanager
def _inside() -> Iterator[None]:
    _thread.inside = True
    try:
        yield
    finally:
        _thread.inside = False


def _report(call: Call, at_once: bool) -> None:
    """Tell the listeners that a call has started; `at_once`: and that it was waited for."""
    for listener in list(_listeners.values()):
        listener.started(call)
        if at_once:
            listener.waited(call)


def _report_counted_as(name: str, payload: int, group: dist.ProcessGroup | None) -> None:
    """A call that stands for others (`accounting.counted_as`)."""
    _report(Call(name, payload, tuple(dist.get_process_group_ranks(group)), dist.get_rank(group)), at_once=True)


accounting.counters.append(_report_counted_as)
