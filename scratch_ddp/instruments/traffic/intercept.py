"""How traffic is seen: every call that reaches a process group, whoever makes it, is reported to listeners.

`torch.distributed.all_reduce`, under whatever name it was imported, ends in `group.allreduce(...)`. So while there are
listeners, these methods are replaced on `ProcessGroup` and on its subclasses written in Python. C++ code (the reducer
of DistributedDataParallel, functional collectives) calls the methods of such a subclass too, but bypasses those of a
plain group. There its calls are seen as operators, by a dispatch mode.
"""

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from scratch_ddp.common import accounting
from scratch_ddp.instruments.traffic.calls import METHODS, Call, call_on, read_method

_FUNCTIONAL = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")


class Listener(Protocol):
    def started(self, call: Call) -> None: ...
    def waited(self, call: Call) -> None: ...


_listeners: dict[object, Listener] = {}  # by a key of their own, since listeners may be equal
_replaced: list[tuple[Any, str, Any]] = []  # of a class or a module
_lock = threading.Lock()
_open: weakref.WeakKeyDictionary[dist.Work, Call] = weakref.WeakKeyDictionary()  # calls not yet waited for
_call_of: weakref.WeakKeyDictionary[torch._C.Future, Call] = weakref.WeakKeyDictionary()


class _Thread(threading.local):
    inside = False  # this thread is in a call that has been reported: calls further down belong to it
    has_mode = False  # this thread's operators go through our dispatch mode


_thread = _Thread()


@contextlib.contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Report every call that any thread makes inside the block to `listener`; calls from C++, of this thread only."""
    with _listed(listener), _operators_reported():
        yield


@contextlib.contextmanager
def prepared() -> Iterator[None]:
    """Replace the methods once for all `listening` blocks inside this one, which then begin and end sooner."""
    with _listed(_Nobody()):
        yield


class _Nobody:
    def started(self, call: Call) -> None:
        pass

    def waited(self, call: Call) -> None:
        pass


@contextlib.contextmanager
def _listed(listener: Listener) -> Iterator[None]:
    key = object()
    with _lock:
        if not _listeners:
            _replace_methods()
            accounting.counters.append(_report_whole)
        _listeners[key] = listener
    try:
        yield
    finally:
        with _lock:
            del _listeners[key]
            if not _listeners:
                accounting.counters.remove(_report_whole)
                _restore_methods()
                _open.clear()  # from now on nobody would see that they are waited for
                _call_of.clear()


def _report_whole(name: str, payload: int, group: dist.ProcessGroup | None) -> None:
    """Report a call that stands for others (`accounting.counted_as`)."""
    call = Call(name, payload, tuple(dist.get_process_group_ranks(group)), dist.get_rank(group))
    _report("started", call)
    _report("waited", call)


def _replace_methods() -> None:
    for cls in with_subclasses(dist.ProcessGroup):
        for method in METHODS.keys() & vars(cls).keys():
            _replace(cls, method, _reported_method)
    for cls in with_subclasses(dist.Work):
        if "wait" in vars(cls):
            _replace(cls, "wait", _reported_wait)
        if "get_future" in vars(cls):
            _replace(cls, "get_future", _noted_future)
    _replace(torch._C.Future, "wait", _reported_future_wait)  # `then` returns one of these
    _replace(torch._C.Future, "then", _noted_then)
    _replace(torch.futures, "wait_all", _reported_wait_for_all)


def _replace(owner: Any, name: str, wrap: Callable) -> None:
    original = vars(owner)[name]  # not getattr: a builtin taken by getattr would no longer bind once put back
    _replaced.append((owner, name, original))
    setattr(owner, name, wrap(name, original))


def _restore_methods() -> None:
    while _replaced:
        setattr(*_replaced.pop())


def with_subclasses(cls: type) -> Iterator[type]:
    """The class, and all that inherit from it."""
    yield cls
    for subclass in cls.__subclasses__():
        yield from with_subclasses(subclass)


def _reported_method(method: str, original: Any) -> Callable:
    def call_and_report(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        run = original.__get__(group, type(group))
        if in_a_call():
            return run(*args, **kwargs)
        with _inside():
            work = run(*args, **kwargs)
        call = read_method(method, group, [*args, *kwargs.values()])
        _report("started", call)
        if work is None:
            _report("waited", call)
        else:
            _open[work] = call
        return work

    return call_and_report


def _reported_wait(_: str, original: Any) -> Callable:
    def wait_and_report(work: dist.Work, *args: Any, **kwargs: Any) -> Any:
        result = original.__get__(work, type(work))(*args, **kwargs)
        call = _open.pop(work, None)
        if call is not None:
            if call.name == "recv" and call.peer is None:
                call.peer = work._source_rank()
            _report("waited", call)
        return result

    return wait_and_report


def _noted_future(_: str, original: Any) -> Callable:
    def get_future_and_note(work: dist.Work) -> Any:
        future = original.__get__(work, type(work))()
        if isinstance(future, torch._C.Future) and work in _open:
            _call_of[future] = _open[work]
        return future

    return get_future_and_note


def _reported_future_wait(_: str, original: Any) -> Callable:
    """Waiting for the future of a call is waiting for the call."""

    def wait_and_report(future: torch.futures.Future) -> Any:
        result = original.__get__(future, type(future))()
        call = _call_of.pop(future, None)
        if call is not None:
            _report("waited", call)
        return result

    return wait_and_report


def _noted_then(_: str, original: Any) -> Callable:
    """Waiting for what follows a call is waiting for the call."""

    def then_and_note(future: torch.futures.Future, callback: Callable) -> Any:
        after = original.__get__(future, type(future))(callback)
        if future in _call_of:
            _call_of[after] = _call_of[future]
        return after

    return then_and_note


def _reported_wait_for_all(_: str, __: Any) -> Callable:
    """torch's own waits in C++, where it would not be seen."""

    def wait_for_all(futures: list[torch.futures.Future]) -> list[Any]:
        return [future.wait() for future in futures]

    return wait_for_all


class LightMode(TorchDispatchMode):
    """A dispatch mode that keeps torch from importing its compiler at the first operation, which takes seconds."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class _Operators(LightMode):
    """Reports the collectives that C++ calls on plain groups. Their waits are in C++ too: they count as waited for."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = None if in_a_call() else _collective(func)
        if name is None:
            return func(*args, **(kwargs or {}))
        with _inside():
            result = func(*args, **(kwargs or {}))
        call = _read_operator(name, func, args, kwargs or {})
        _report("started", call)
        _report("waited", call)
        return result


@contextlib.contextmanager
def _operators_reported() -> Iterator[None]:
    if _thread.has_mode:
        yield
        return
    _thread.has_mode = True
    try:
        with _Operators():
            yield
    finally:
        _thread.has_mode = False


def works_under_way() -> dict[dist.Work, Call]:
    """The asynchronous calls of this process that were started while there were listeners, and not waited for yet."""
    return {work: call for work, call in _open.items() if not call.waited}


def in_a_call() -> bool:
    """Whether this thread is inside a call that is reported as a whole: calls from there are the library's own."""
    return _thread.inside or accounting.is_counted_as_another()


@contextlib.contextmanager
def _inside() -> Iterator[None]:
    _thread.inside = True
    try:
        yield
    finally:
        _thread.inside = False


def _report(event: str, call: Call) -> None:
    if event == "waited":
        if call.waited:  # for the work, and then for its future
            return
        call.waited = True
    for listener in list(_listeners.values()):
        getattr(listener, event)(call)


@functools.cache
def _collective(func: Any) -> str | None:
    space, _, operator = func._schema.name.partition("::")
    if space == "c10d" and (found := METHODS.get(operator.removesuffix("_"))):
        return found[0]
    if space == "_c10d_functional":
        return next((name for name in _FUNCTIONAL if operator.startswith(name)), None)
    return None


def _read_operator(name: str, func: Any, args: tuple, kwargs: dict) -> Call:
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    if "process_group" in given:
        group = dist.ProcessGroup.unbox(given["process_group"])
        position = METHODS[func._schema.name.removeprefix("c10d::").removesuffix("_")][1]
        tensors = () if position is None else args[position]
    else:
        group, tensors = given["group_name"], args[0]
        if isinstance(group, str):
            group = dist.distributed_c10d._resolve_process_group(group)
    root = given.get("root_rank", given.get("src", given.get("dst")))
    return call_on(name, tensors, group, root, given.get("tag", 0), given.get("input_split_sizes", ()))
