"""How traffic is seen: every call that reaches a process group, whoever makes it, is reported to the listeners.

`torch.distributed.all_reduce`, under whatever name it was imported, ends in `group.allreduce(...)`. The first listener
wraps these methods, of `ProcessGroup` and of its subclasses in Python, for good. C++ code (DistributedDataParallel's
reducer, functional collectives) calls the methods of such a subclass too, but not those of a plain group. There its
calls are operators, which a dispatch mode sees. The outermost call counts: what it does on its way down is part of it.
"""

import contextlib
import functools
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from scratch_ddp.common import accounting
from scratch_ddp.instruments.cost.wire import ring_bytes

_NAMES = ("send", "recv", "all_reduce", "broadcast", "reduce_scatter", "reduce", "all_gather", "gather", "scatter")
_NAMES += ("all_to_all", "barrier")
_OUTPUT_FIRST = ("all_gather", "gather", "scatter", "reduce_scatter", "all_to_all")  # then come this rank's tensors


def _name_of(method: str) -> str | None:
    """The call that a group's method or an operator makes: `_allgather_base` and `all_gather_single` are all_gather."""
    letters = method.replace("_", "")
    return next((name for name in _NAMES if letters.startswith(name.replace("_", ""))), None)


METHODS = {method: name for method in dir(dist.ProcessGroup) if (name := _name_of(method))}  # of a process group


@dataclass(eq=False)
class Call:
    """One call as the group received it. `rank` and `peer` are ranks in the group, `members` its global ranks."""

    name: str
    payload: int  # bytes of this rank's input tensors; for a receive, of its buffer
    members: tuple[int, ...]
    rank: int
    peer: int | None = None  # the other end of a message (None until wait() knows it), or the root of a collective
    tag: int = 0
    kept: int | None = None  # of an all-to-all: bytes of the piece that stays on this rank; None: an n-th of all

    @property
    def sent(self) -> int:
        """Bytes that this rank sends: on a ring, or each piece of an all-to-all straight to its rank."""
        if self.kept is not None:
            return self.payload - self.kept
        return ring_bytes(self.name, self.payload, len(self.members), self.rank, self.peer)


def read_method(method: str, group: dist.ProcessGroup, values: list) -> Call:
    """Describe a call of the group's `method` with these arguments, in their order."""
    name = METHODS[method]
    peer, tag = next((value.rootRank for value in values if hasattr(value, "rootRank")), None), 0
    if name in ("send", "recv"):
        peer, tag = (None, values[1]) if method == "recv_anysource" else (values[1], values[2])
    elif name == "broadcast" and peer is None:
        peer = values[1]  # the short form: (tensor, root)
    splits = values[3] if name == "all_to_all" and method != "alltoall" else ()
    return _call(name, values, group, peer, tag, splits)


def read_operator(func: Any, args: tuple, kwargs: dict) -> Call | None:
    """Describe a call of the operator `func`, or return None if it is no collective."""
    name = _operators_name(func)
    if name is None:
        return None
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    if "process_group" in given:
        group = dist.ProcessGroup.unbox(given["process_group"])
    else:  # functional: no output is passed
        group, args = given["group_name"], (args[0], args[0])
        group = dist.distributed_c10d._resolve_process_group(group) if isinstance(group, str) else group
    root = given.get("root_rank", given.get("src", given.get("dst")))
    return _call(name, args, group, root, given.get("tag", 0), given.get("input_split_sizes", ()))


@functools.cache
def _operators_name(func: Any) -> str | None:
    space, _, operator = func.name().partition("::")
    return _name_of(operator) if space in ("c10d", "_c10d_functional") else None


def _call(
    name: str, values: Sequence, group: dist.ProcessGroup, peer: int | None, tag: int, splits: Sequence[int]
) -> Call:
    """splits: of an all-to-all of one tensor, how many rows go to each rank; empty if equally many."""
    tensors = () if name == "barrier" else values[name in _OUTPUT_FIRST]
    members = dist.distributed_c10d._world.pg_group_ranks.get(group) or range(group.size())
    call = Call(name, sum(tensor.nbytes for tensor in tree_leaves(tensors)), tuple(members), group.rank(), peer, tag)
    if name == "all_to_all" and not isinstance(tensors, torch.Tensor):
        call.kept = tensors[call.rank].nbytes
    elif name == "all_to_all" and splits:
        call.kept = splits[call.rank] * tensors[:1].nbytes
    return call


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
        if not _listeners or accounting.is_part_of_a_call():
            return run(*args, **kwargs)
        work = accounting.as_part_of_a_call(run, *args, **kwargs)
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
            result = accounting.as_part_of_a_call(original.__get__(work, type(work)), *args, **kwargs)
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
        if any(each.__name__ == "DTensor" for each in types):
            return NotImplemented  # it runs the operation first, and the collectives inside come here
        call = None if accounting.is_part_of_a_call() else read_operator(func, args, kwargs or {})
        if call is None:
            return func(*args, **(kwargs or {}))
        result = accounting.as_part_of_a_call(func, *args, **(kwargs or {}))
        _report(call, at_once=True)
        return result


def _report(call: Call, at_once: bool) -> None:
    """Tell the listeners that a call has started; `at_once`: and that it was waited for."""
    for listener in list(_listeners.values()):
        listener.started(call)
        if at_once:
            listener.waited(call)


@accounting.counters.append
def _report_counted_as(name: str, payload: int, group: dist.ProcessGroup | None) -> None:
    """A call that stands for others (`accounting.counted_as`)."""
    _report(Call(name, payload, tuple(dist.get_process_group_ranks(group)), dist.get_rank(group)), at_once=True)
