"""Where traffic is seen: every call that reaches a process group, whoever makes it.

`torch.distributed.all_reduce`, under whatever name it was imported, ends in `group.allreduce(...)`. So while somebody
listens, these methods are replaced on `ProcessGroup` and on its subclasses written in Python. C++ code (the reducer of
DistributedDataParallel, functional collectives) calls the methods of such a subclass too, but goes past those of a
plain group: there its calls are seen as operators, by a dispatch mode.
"""

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

# A group's method -> (the call's name, the position of the tensors that this rank puts in). The operators
# c10d::<method>_ take them at the same position.
METHODS = {
    "send": ("send", 0),
    "recv": ("recv", 0),
    "recv_anysource": ("recv", 0),
    "allreduce": ("all_reduce", 0),
    "allreduce_coalesced": ("all_reduce", 0),
    "broadcast": ("broadcast", 0),
    "reduce": ("reduce", 0),
    "allgather": ("all_gather", 1),
    "allgather_coalesced": ("all_gather", 1),
    "allgather_into_tensor_coalesced": ("all_gather", 1),
    "all_gather_single": ("all_gather", 1),
    "all_gather_single_coalesced": ("all_gather", 1),
    "_allgather_base": ("all_gather", 1),
    "gather": ("gather", 1),
    "scatter": ("scatter", 1),
    "reduce_scatter": ("reduce_scatter", 1),
    "reduce_scatter_single": ("reduce_scatter", 1),
    "reduce_scatter_single_coalesced": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", 1),
    "_reduce_scatter_base": ("reduce_scatter", 1),
    "alltoall": ("all_to_all", 1),
    "alltoall_base": ("all_to_all", 1),
    "all_to_all_single": ("all_to_all", 1),
    "barrier": ("barrier", None),
}
FUNCTIONAL = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")


@dataclass(eq=False)
class Call:
    """One call as the group got it. `rank` and `peer` are ranks in the group, `members` its global ranks."""

    name: str
    payload: int  # bytes of the tensors that this rank puts in; of a receive: of its buffer
    members: tuple[int, ...]
    rank: int
    peer: int | None = None  # the other end of a message (None until wait() tells it), or the root of a collective
    tag: int = 0


class Listener(Protocol):
    def started(self, call: Call) -> None: ...
    def waited(self, call: Call) -> None: ...


_listeners: dict[object, Listener] = {}  # by a key of its own: listeners may be equal
_replaced: list[tuple[type, str, Any]] = []
_lock = threading.Lock()
_open: weakref.WeakKeyDictionary[dist.Work, Call] = weakref.WeakKeyDictionary()  # calls whose wait() is yet to come


class _Thread(threading.local):
    inside = False  # this thread is in a call that has been seen: what it causes further down is the same call
    watched = False  # this thread's operators go through our mode


_thread = _Thread()


@contextlib.contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Tell `listener` of every call that any thread makes inside the block; C++'s calls, of this thread only."""
    key = object()
    with _lock:
        if not _listeners:
            _replace_methods()
        _listeners[key] = listener
    try:
        with _watched_operators():
            yield
    finally:
        with _lock:
            del _listeners[key]
            if not _listeners:
                _restore_methods()


@contextlib.contextmanager
def counted_as(name: str, payload: int, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Let what this thread calls inside count as one call `name` of `payload` bytes: a collective made of others."""
    with _inside():
        yield
    if _listeners:
        call = Call(name, payload, tuple(dist.get_process_group_ranks(group)), dist.get_rank(group))
        _tell("started", call)
        _tell("waited", call)


def _replace_methods() -> None:
    for cls in _with_subclasses(dist.ProcessGroup):
        for method in METHODS.keys() & vars(cls).keys():
            _replace(cls, method, _seen_method)
    for cls in _with_subclasses(dist.Work):
        if "wait" in vars(cls):
            _replace(cls, "wait", _seen_wait)


def _replace(cls: type, name: str, wrap: Callable) -> None:
    original = vars(cls)[name]  # not getattr: a builtin taken by getattr and put back would no longer bind
    _replaced.append((cls, name, original))
    setattr(cls, name, wrap(name, original))


def _restore_methods() -> None:
    while _replaced:
        setattr(*_replaced.pop())


def _with_subclasses(cls: type) -> Iterator[type]:
    yield cls
    for subclass in cls.__subclasses__():
        yield from _with_subclasses(subclass)


def _seen_method(method: str, original: Any) -> Callable:
    def call_and_tell(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        run = original.__get__(group, type(group))
        if _thread.inside:
            return run(*args, **kwargs)
        with _inside():
            work = run(*args, **kwargs)
        call = read_method(method, group, [*args, *kwargs.values()])
        _tell("started", call)
        if work is None:
            _tell("waited", call)
        else:
            _open[work] = call
        return work

    return call_and_tell


def _seen_wait(_: str, original: Any) -> Callable:
    def wait_and_tell(work: dist.Work, *args: Any, **kwargs: Any) -> Any:
        result = original.__get__(work, type(work))(*args, **kwargs)
        call = _open.pop(work, None)
        if call is not None:
            if call.name == "recv" and call.peer is None:
                call.peer = work._source_rank()
            _tell("waited", call)
        return result

    return wait_and_tell


class _Operators(TorchDispatchMode):
    """Sees the collectives that C++ calls on plain groups. Their waits are in C++ too: they count as waited for."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or torch imports its compiler, which takes seconds, at the first operation

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = None if _thread.inside else _collective(func)
        if name is None:
            return func(*args, **(kwargs or {}))
        with _inside():
            result = func(*args, **(kwargs or {}))
        call = _read_operator(name, func, args, kwargs or {})
        _tell("started", call)
        _tell("waited", call)
        return result


@contextlib.contextmanager
def _watched_operators() -> Iterator[None]:
    if _thread.watched:
        yield
        return
    _thread.watched = True
    try:
        with _Operators():
            yield
    finally:
        _thread.watched = False


def in_a_call() -> bool:
    """Is this thread inside a call that has been seen? What happens there is the library's doing."""
    return _thread.inside


@contextlib.contextmanager
def _inside() -> Iterator[None]:
    _thread.inside = True
    try:
        yield
    finally:
        _thread.inside = False


def _tell(what: str, call: Call) -> None:
    for listener in list(_listeners.values()):
        getattr(listener, what)(call)


def read_method(method: str, group: dist.ProcessGroup, values: list) -> Call:
    """Say what a call of the group's `method` with these arguments, in their order, asks for."""
    name, position = METHODS[method]
    peer, tag = next((value.rootRank for value in values if hasattr(value, "rootRank")), None), 0
    if name in ("send", "recv"):
        peer, tag = (None, values[1]) if method == "recv_anysource" else (values[1], values[2])
    elif name in ("broadcast", "reduce", "gather", "scatter") and peer is None:
        peer = values[1]  # the short form of broadcast: (tensor, root)
    return _call(name, () if position is None else values[position], group, peer, tag)


def _collective(func: Any) -> str | None:
    space, _, operator = func._schema.name.partition("::")
    if space == "c10d" and (found := METHODS.get(operator.removesuffix("_"))):
        return found[0]
    if space == "_c10d_functional":
        return next((name for name in FUNCTIONAL if operator.startswith(name)), None)
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
    return _call(name, tensors, group, given.get("root_rank", given.get("src", given.get("dst"))), given.get("tag", 0))


def _call(name: str, tensors: Any, group: dist.ProcessGroup, peer: int | None, tag: int) -> Call:
    try:
        members = tuple(dist.get_process_group_ranks(group))
    except KeyError:  # a group that torch.distributed has not registered
        members = tuple(range(group.size()))
    payload = sum(tensor.numel() * tensor.element_size() for tensor in _flat(tensors))
    return Call(name, payload, members, group.rank(), peer, tag)


def _flat(tensors: Any) -> Iterable[torch.Tensor]:
    if isinstance(tensors, torch.Tensor):
        yield tensors
    else:
        for item in tensors:
            yield from _flat(item)
