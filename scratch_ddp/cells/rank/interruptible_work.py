"""Waits that a signal can interrupt: for an operation of gloo, and for two functions of torch that block in C++.

A thread that waits inside gloo can't be woken. So a helper thread waits there, and the caller waits for the helper in
Python, where a signal is noticed at once. After an interrupt the helper goes on waiting until its group is ended.

Each wait is for a "call": {"operation", "group" (its name), "number" (of the collective in its group), "given"
("4 × float32"), "op" (" (SUM)"), "root" (" from rank 0"), "peer" (" to rank 1"), "uid" (of the group, or None),
"key" (under which it is counted), "position" (how many gloo had been given before under that key), "ranks" (whom a
message may come from or go to), "serial" (another for each call of this process)}.
"""

import contextlib
import datetime
import functools
import itertools
import os
import queue
import socket
import stat
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

# Sets of weak references: unlike a WeakSet, they can be listed while another thread adds to them.
_works: "set[weakref.ref[InterruptibleWork]]" = set()  # those that C++ may wait for, by their future
_under_way: "set[InterruptibleWork]" = set()
_futures: "set[weakref.ref[torch.futures.Future]]" = set()  # of groups around an interruptible one
_main_thread_waits_in: dict[str, Any] | None = None
_in_helper = threading.local()  # `call`: what the main thread waits in while this thread runs its task
_serials = itertools.count()
_TURN = 0.1  # seconds
_TIMEVAL = 16  # bytes of C's struct timeval
INTERRUPTED = "interrupted"  # what a wait in C++ raises that a Stop has ended


def waiting_in() -> dict[str, Any] | None:
    """The call that the main thread waits in, or None."""
    return _main_thread_waits_in


def awaited_in_native_code() -> dict[str, Any] | None:
    """The oldest call that has a future and has not ended: what torch's DDP waits for, inside C++."""
    calls = [work.call for work in alive(_works) if not work.is_completed()]
    return min(calls, key=lambda call: call["serial"], default=None)


def under_way_in(uid: int) -> "list[InterruptibleWork]":
    """What has not ended in the group with this `uid`."""
    return [work for work in list(_under_way) if work.call["uid"] == uid]


def wait_for_ends(works: "list[InterruptibleWork]", seconds: float) -> None:
    """Wait until all of them have ended, but no longer than `seconds` in all."""
    deadline = time.monotonic() + seconds
    for work in works:
        work.ended.wait(max(0.0, deadline - time.monotonic()))


def free_waiting_futures() -> None:
    """End every wait in C++ for a future of ours (to be called from a thread that is not stuck)."""
    for work in alive(_works):
        work.give_up(RuntimeError(INTERRUPTED))
    for future in alive(_futures):
        with contextlib.suppress(RuntimeError):  # it has been set in this moment
            if not future.done():
                future.set_exception(RuntimeError(INTERRUPTED))


def free_too(future: torch.futures.Future) -> None:
    """From now on `free_waiting_futures` ends waits for this future as well."""
    _futures.add(weakref.ref(future, _futures.discard))


def alive(references: "set[weakref.ref[Any]]") -> list[Any]:
    """What is still there of a set that another thread may add to meanwhile."""
    return [one for reference in list(references) if (one := reference()) is not None]


def make_call(operation: str, group: str = "", **details: Any) -> dict[str, Any]:
    empty = {
        "number": 0,
        "given": "",
        "op": "",
        "root": "",
        "peer": "",
        "uid": None,
        "key": "",
        "position": 0,
        "ranks": None,
    }
    return {"operation": operation, "group": group, **empty, "serial": next(_serials), **details}


def describe_tensor(tensor: torch.Tensor) -> str:
    """ "4 × float32" """
    return f"{tensor.numel()} × {str(tensor.dtype).removeprefix('torch.')}"


@functools.cache
def name_of(op: dist.ReduceOp.RedOpType) -> str:
    return f" ({op.name})"


def describe_given(args: tuple, dtype_only: bool) -> str:
    """The first tensor that an operation was given: "4 × float32", or "float32"."""
    for given in args:
        while isinstance(given, (list, tuple)) and given:
            given = given[0]
        if isinstance(given, torch.Tensor):
            return describe_tensor(given).rpartition(" ")[2] if dtype_only else describe_tensor(given)
    return ""


def pieces_of(
    n: int, output: torch.Tensor, tensor: torch.Tensor, out_splits: list[int], in_splits: list[int]
) -> tuple[list[int], list[int]]:
    """How many elements of an all-to-all go to each rank, and come from each."""
    counts = []
    for each, splits in ((tensor, in_splits), (output, out_splits)):
        row = each.numel() // len(each) if each.ndim and len(each) else 0
        counts.append([row * rows for rows in splits] or [each.numel() // n] * n)
    return counts[0], counts[1]


class InterruptibleWork(dist.Work):
    """An operation under way. `wait` can be interrupted by a signal; the tensors are gloo's until it has ended."""

    def __init__(self, start: Callable[[], Any], call: dict[str, Any], stopped: Callable[[], bool]):
        """`start` hands the operation to gloo; `stopped` tells whether the group of gloo was ended under way."""
        super().__init__()
        self.call = call
        self.awaited = False  # whether anybody has asked for the end
        self._stopped = stopped
        self._error: BaseException | None = None
        self.ended = threading.Event()
        self._future: torch.futures.Future | None = None
        self._lock = threading.Lock()
        # Holds the group of gloo until then: destroying it would wait for the operation, and some never end.
        self._start: Callable[[], Any] | None = start
        self._work: dist.Work | None = start()
        _under_way.add(self)
        _helpers.run(self._wait_in_gloo)

    def _wait_in_gloo(self) -> None:
        try:
            self._work.wait()
        except BaseException as error:  # whatever gloo raises belongs to the caller that waits
            self._error = error
            self._work = None  # gloo's threads live as long as it does, and tracebacks hold this object
        self._start = None
        with self._lock:
            self.ended.set()
            self._settle_future()
        _under_way.discard(self)

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        __tracebackhide__ = True  # learners see their own line, not this one
        self.awaited = True
        with _main_thread_waits(self.call):
            # torch passes 0 for "no limit of its own".
            if not self.ended.wait(timeout.total_seconds() if timeout else None):
                raise RuntimeError(f"{self.call['operation']}: not finished after {timeout.total_seconds():g} s")
        if self._error is not None and self._stopped():  # not asked before: a peer's connection may end first
            raise RuntimeError(f"{self.call['operation']} was ended with a cell that stopped or failed")
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return self.ended.is_set()

    def is_success(self) -> bool:
        return self.ended.is_set() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> list[torch.Tensor]:
        return self._tensors()

    def _source_rank(self) -> int:
        return self._work._source_rank() if self._work is not None else -1

    def get_future(self) -> torch.futures.Future:
        """A future of our own: torch's DDP waits for it inside C++, where only an error set on it can free it."""
        self.awaited = True
        with self._lock:
            if self._future is None:
                self._future = torch.futures.Future()
                _works.add(weakref.ref(self, _works.discard))
                if self.ended.is_set():
                    self._settle_future()
        return self._future

    def _settle_future(self, error: BaseException | None = None) -> None:
        if self._future is None or self._future.done():
            return
        if error := error or self._error:
            self._future.set_exception(error)
        else:
            self._future.set_result(self._tensors())

    def _tensors(self) -> list[torch.Tensor]:
        """What the operation filled. (`Work.result` gives the same, with a deprecation warning.)"""
        if self._work is None:
            return []
        try:
            return self._work.get_future().value()
        except RuntimeError:  # gloo has none for a send or a receive
            return []

    def give_up(self, error: BaseException) -> None:
        """Set the error on the future, if there is one and nothing was set yet."""
        with self._lock:
            self._settle_future(error)


class CoalescedWork:
    """Several works of gloo that are waited for as one."""

    def __init__(self, works: list[dist.Work]):
        self._works = works

    def wait(self) -> bool:
        return all(work.wait() for work in self._works)

    def get_future(self) -> torch.futures.Future:
        """A future that is set already: asked for when all works have ended."""
        future: torch.futures.Future = torch.futures.Future()
        future.set_result([tensor for work in self._works for tensor in work.get_future().value()])
        return future


def run_in_helper(task: Callable[[], Any], call: dict[str, Any]) -> Any:
    """Run a task that may block in C++ in a helper thread, so that the wait for it can be interrupted."""
    __tracebackhide__ = True
    ended, result, error = threading.Event(), [], []

    def run() -> None:
        _in_helper.call = call
        try:
            result.append(task())
        except BaseException as raised:
            error.append(raised)
        ended.set()

    _helpers.run(run)
    with _main_thread_waits(call):
        ended.wait()
    if error:
        raise error[0]
    return result[0]


def wait_in_store(store: dist.Store, keys: list[str], timeout: datetime.timedelta, call: dict[str, Any]) -> None:
    """Wait until other ranks have set `keys`, in turns: between two of them a Stop ends it, and no thread is left."""
    __tracebackhide__ = True
    end = time.monotonic() + timeout.total_seconds()
    with _main_thread_waits(call):
        while True:
            try:
                return store.wait(keys, datetime.timedelta(seconds=_TURN))
            except RuntimeError as error:  # what a store raises after that time depends on its kind
                if isinstance(error, dist.DistNetworkError) or time.monotonic() > end:
                    raise


class _Helpers:
    """Threads that wait in gloo. One that is stuck there is left behind; the next wait takes or starts another."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)

    def run(self, task: Callable[[], None]) -> None:
        self._tasks.put(task)
        if not self._idle.acquire(blocking=False):
            helper = threading.Thread(target=self._work, name="waits-in-gloo", daemon=True)
            helper.belongs_to_no_cell = True  # it outlives the cell that needed it first (see `output_streams`)
            helper.start()

    def _work(self) -> None:
        while True:
            self._tasks.get()()
            self._idle.release()


_helpers = _Helpers()


@contextlib.contextmanager
def _main_thread_waits(call: dict[str, Any]) -> Iterator[None]:
    global _main_thread_waits_in
    if threading.current_thread() is not threading.main_thread():
        if hasattr(_in_helper, "call"):
            _in_helper.call.update(call)  # it is known better here
        yield
        return
    outer, _main_thread_waits_in = _main_thread_waits_in, call
    try:
        yield
    finally:
        _main_thread_waits_in = outer


# Functional collectives (DTensor, tensor parallelism) hand their operation to gloo itself and wait for it by tensor.
# `new_group` ends with a barrier over the store that reaches all ranks, also those outside of the group.
_store_barrier = dist.distributed_c10d._store_based_barrier
_wait_tensor = functional.wait_tensor


def make_torch_interruptible() -> None:
    """Replace torch's two functions that wait past every process group. Calling it again changes nothing."""
    dist.distributed_c10d._store_based_barrier = _wait_at_store_barrier
    functional.wait_tensor = _wait_for_tensor


def _wait_at_store_barrier(rank: int, store: dist.Store, group_name: str, *args: Any, **kwargs: Any) -> None:
    __tracebackhide__ = True
    call = make_call("new_group", group_name)
    run_in_helper(lambda: _store_barrier(rank, store, group_name, *args, **kwargs), call)


def _wait_for_tensor(tensor: torch.Tensor) -> torch.Tensor:
    __tracebackhide__ = True
    if type(tensor) is torch.Tensor and not torch.compiler.is_compiling():
        same_memory = tensor.detach()  # torch finds the operation by the memory; autograd stays with the call below
        call = make_call("a functional collective", given=describe_tensor(tensor))
        run_in_helper(lambda: torch.ops._c10d_functional.wait_tensor(same_memory), call)
    return _wait_tensor(tensor)


# gloo's connections to the other ranks


class Connections:
    """The TCP sockets that gloo has opened in this process while `make` ran. `made` is what it returned.

    gloo can't abort an operation. But a wait ends at once, in an error, when the connection it waits for is closed.
    Then nobody holds the group any more, and gloo gives its threads and descriptors back.
    """

    def __init__(self, make: Callable[[], Any]):
        self.ended = False
        before = _sockets()
        self.made = make()
        self._sockets = _sockets() - before

    def end(self) -> None:
        """End all that are still open. A descriptor that is another file by now is left alone."""
        self.ended = True
        for descriptor, number in self._sockets:
            with contextlib.suppress(OSError):
                if os.fstat(descriptor).st_ino == number:
                    with _borrowed(descriptor) as connection:
                        connection.shutdown(socket.SHUT_RDWR)


def _sockets() -> set[tuple[int, int]]:
    """(descriptor, inode) of each connected TCP socket of this process that may be gloo's."""
    found = set()
    for name in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile, or a socket that is not connected
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                with _borrowed(int(name)) as one:
                    if one.family in (socket.AF_INET, socket.AF_INET6) and one.getpeername() and _may_be_gloos(one):
                        found.add((int(name), status.st_ino))
    return found


def _may_be_gloos(one: socket.socket) -> bool:
    """gloo sets a time limit for reading on its sockets, as hardly anybody else does; on macOS not even gloo."""
    return sys.platform == "darwin" or any(one.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEVAL))


@contextlib.contextmanager
def _borrowed(descriptor: int) -> Iterator[socket.socket]:
    """A descriptor of gloo's as a socket. No copy: gloo would get events of what it has closed."""
    borrowed = socket.socket(fileno=descriptor)
    try:
        yield borrowed
    finally:
        borrowed.detach()
