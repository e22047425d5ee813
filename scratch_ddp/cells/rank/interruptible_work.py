"""An operation of gloo that can be waited for, interrupted and given up (see `watched_group`)."""

import contextlib
import datetime
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

_futures: "weakref.WeakSet[WatchedWork]" = weakref.WeakSet()  # works that C++ waits for
_others: "weakref.WeakSet[torch.futures.Future]" = weakref.WeakSet()  # futures of groups around ours
_main_thread_waits_in: dict[str, Any] | None = None


def waiting_in() -> dict[str, Any] | None:
    """The operation that the main thread waits in ({"operation", "group", "number", "given", "peer"}), or None."""
    return _main_thread_waits_in


def awaited_in_native_code() -> dict[str, Any] | None:
    """The oldest operation that has a future and has not ended: what torch's DDP waits for, inside C++."""
    calls = [work._call for work in list(_futures) if not work._ended.is_set()]
    return min(calls, key=lambda call: call["number"], default=None)


@contextlib.contextmanager
def _main_thread_waits(call: dict[str, Any]) -> Iterator[None]:
    global _main_thread_waits_in
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    outer, _main_thread_waits_in = _main_thread_waits_in, call
    try:
        yield
    finally:
        _main_thread_waits_in = outer


class _Helpers:
    """Threads that wait in gloo. One that is stuck there is given up; the next wait takes or starts another."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)

    def run(self, task: Callable[[], None]) -> None:
        self._tasks.put(task)
        if not self._idle.acquire(blocking=False):
            helper = threading.Thread(target=self._work, name="waits-in-gloo", daemon=True)
            helper.belongs_to_no_cell = True  # it outlives the cell that needed it first
            helper.start()

    def _work(self) -> None:
        while True:
            self._tasks.get()()
            self._idle.release()


_helpers = _Helpers()


class WorkOfSeveral:
    """Several works of gloo that are waited for as one."""

    def __init__(self, works: list[dist.Work]):
        self._works = works

    def wait(self) -> bool:
        return all(work.wait() for work in self._works)

    def get_future(self) -> torch.futures.Future:
        """A future that has already come: asked for when all have ended."""
        future: torch.futures.Future = torch.futures.Future()
        future.set_result([tensor for work in self._works for tensor in work.get_future().value()])
        return future


class WatchedWork(dist.Work):
    """An operation under way. `wait` can be interrupted by a signal; the tensors are gloo's until it has ended."""

    def __init__(self, start: Callable[[], Any], call: dict[str, Any]):
        super().__init__()
        self._call = call
        self._work: dist.Work | None = None
        self._error: BaseException | None = None
        self._ended = threading.Event()
        self._future: torch.futures.Future | None = None
        self._lock = threading.Lock()
        self._work = start()
        _helpers.run(self._wait_in_gloo)

    def _wait_in_gloo(self) -> None:
        try:
            self._work.wait()
        except BaseException as error:  # whatever gloo says belongs to whoever waits
            self._error = error
        with self._lock:
            self._ended.set()
            self._settle_future()

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        __tracebackhide__ = True  # learners see their own line, not this one
        with _main_thread_waits(self._call):
            # torch passes 0 for "no limit of its own".
            if not self._ended.wait(timeout.total_seconds() if timeout else None):
                raise RuntimeError(f"{self._call['operation']}: not through after {timeout.total_seconds():g} s")
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return self._ended.is_set()

    def is_success(self) -> bool:
        return self._ended.is_set() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> list[torch.Tensor]:
        return self._tensors()

    def _source_rank(self) -> int:
        return self._work._source_rank()

    def get_future(self) -> torch.futures.Future:
        """A future of our own: torch's DDP waits for it inside C++, where only an error set on it can free it."""
        with self._lock:
            if self._future is None:
                self._future = torch.futures.Future()
                _futures.add(self)
                if self._ended.is_set():
                    self._settle_future()
        return self._future

    def _settle_future(self) -> None:
        if self._future is None or self._future.done():
            return
        if self._error is not None:
            self._future.set_exception(self._error)
        else:
            self._future.set_result(self._tensors())

    def _tensors(self) -> list[torch.Tensor]:
        """What the operation filled. (`Work.result` says the same, with a warning that it will go.)"""
        try:
            return self._work.get_future().value()
        except RuntimeError:  # gloo has none for a send or a receive
            return []

    def give_up(self, error: BaseException) -> None:
        with self._lock:
            if self._future is not None and not self._future.done():
                self._future.set_exception(error)


def describe_tensor(tensor: torch.Tensor) -> str:
    """What an operation was given, in words: "4 × float32"."""
    return f"{tensor.numel()} × {str(tensor.dtype).removeprefix('torch.')}"


def free_waiting_futures() -> None:
    """End every wait that hangs in C++ on a future of ours (called from a thread that is not stuck)."""
    for work in list(_futures):
        work.give_up(RuntimeError("interrupted"))
    for future in list(_others):
        with contextlib.suppress(RuntimeError):  # it has come in this moment
            if not future.done():
                future.set_exception(RuntimeError("interrupted"))


def free_too(future: torch.futures.Future) -> None:
    """From now on `free_waiting_futures` ends waits for this future as well."""
    _others.add(future)


def run_in_helper(task: Callable[[], Any], call: dict[str, Any]) -> Any:
    """Run a task that may block in C++ in a helper thread, so that the wait for it can be interrupted."""
    __tracebackhide__ = True
    ended, result, error = threading.Event(), [], []

    def run() -> None:
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


# FOLDED: Two places where torch waits in C++ past every process group, made interruptible; and who is in a group.
#
# Functional collectives (DTensor, tensor parallelism) hand their operation straight to gloo and wait for it by tensor;
# `new_group` ends with a barrier over the store that reaches all ranks, also those outside of the group.

_store_barrier = dist.distributed_c10d._store_based_barrier
_wait_tensor = functional.wait_tensor


def make_interruptible() -> None:
    """Take the place of torch's two functions in this process. Calling it again changes nothing."""
    dist.distributed_c10d._store_based_barrier = _wait_at_store_barrier
    functional.wait_tensor = _wait_for_tensor


def ranks_of(group_name: str) -> list[int] | None:
    """The ranks of this process's group of that name, by their numbers among all; None if there is none now."""
    for group, name in list(dist.distributed_c10d._world.pg_names.items()):
        if name == group_name:
            return dist.get_process_group_ranks(group)
    return None


def _wait_at_store_barrier(rank: int, store: dist.Store, group_name: str, *args: Any, **kwargs: Any) -> None:
    __tracebackhide__ = True
    call = {"operation": "new_group", "group": group_name, "number": 0, "given": "", "peer": ""}
    run_in_helper(lambda: _store_barrier(rank, store, group_name, *args, **kwargs), call)


def _wait_for_tensor(tensor: torch.Tensor) -> torch.Tensor:
    __tracebackhide__ = True
    if type(tensor) is torch.Tensor and not torch.compiler.is_compiling():
        same_memory = tensor.detach()  # torch finds the operation by the memory; autograd stays with the call below
        call = {"operation": "a functional collective", "group": "", "number": 0, "peer": ""}
        run_in_helper(
            lambda: torch.ops._c10d_functional.wait_tensor(same_memory), call | {"given": describe_tensor(tensor)}
        )
    return _wait_tensor(tensor)
