"""Waits that a Stop can end: for an operation of gloo, and for keys in a store.

The main thread waits in gloo itself, where it notices no signal. So on a Stop the rank's second thread sends the signal
and, when all ranks have got theirs, ends gloo's connections (`Connections`): the wait ends in an error, and Python
notices the signal.

Each wait is for a "call": {"operation", "group" (its name), "number" (of the collective in its group), "given"
("4 × float32"), "op" (" (SUM)"), "root" (" from rank 0"), "peer" (" to rank 1"), "uid" (of the group, or None),
"key" (under which it is counted), "position" (how many gloo had been given before under that key), "ranks" (whom a
message may come from or go to), "serial" (another for each call of this process)}.
"""

import contextlib
import datetime
import itertools
import os
import socket
import stat
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

# Thread → the call that it waits in. No function stands between the end of a wait and the `del` of its entry: there
# Python would notice the signal that has ended the wait.
_waits_in: dict[int, dict[str, Any]] = {}
_serials = itertools.count()
_TURN = 0.1  # seconds
_NO_LIMIT = datetime.timedelta(0)  # of its own, for torch
_TIMEVAL = 16  # bytes of C's struct timeval
_MESSAGES = 16  # the last of them, which are held: gloo does not send one whose work is gone


def waiting_in() -> dict[str, Any] | None:
    """The call that the main thread waits in, or None."""
    return _waits_in.get(threading.main_thread().ident)


def make_call(operation: str, group: str = "", **details: Any) -> dict[str, Any]:
    """A call of which nothing is known but these details (see above)."""
    call = {"operation": operation, "group": group, "number": 0, "given": "", "op": "", "root": "", "peer": ""}
    call |= {"uid": None, "key": "", "position": 0, "ranks": None, "serial": next(_serials)}
    return call | details


def describe_given(args: tuple, dtype_only: bool) -> str:
    """The first tensor that an operation was given: "4 × float32", or "float32"."""
    for given in args:
        while isinstance(given, (list, tuple)) and given:
            given = given[0]
        if isinstance(given, torch.Tensor):
            dtype = str(given.dtype).removeprefix("torch.")
            return dtype if dtype_only else f"{given.numel()} × {dtype}"
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
    """An operation that gloo has been given, perhaps in several `works`. The tensors are gloo's until it has ended."""

    def __init__(self, works: list[dist.Work], call: dict[str, Any], connections: "Connections"):
        super().__init__()
        self.call = call
        self.awaited = False  # whether anybody has asked for the end
        self._works, self._connections = works, connections
        self._error: RuntimeError | None = None

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        __tracebackhide__ = True  # learners see their own line, not this one
        self.awaited = True
        if self._error is None:
            self._wait_in_gloo(timeout or _NO_LIMIT)
        if self._error is not None and self._connections.ended:
            raise RuntimeError(f"{self.call['operation']} was ended with a cell that stopped or failed")
        if self._error is not None:
            raise self._error
        return True

    def _wait_in_gloo(self, timeout: datetime.timedelta) -> None:
        __tracebackhide__ = True
        here = threading.get_ident()
        try:
            _waits_in[here] = self.call
            for work in self._works:
                work.wait(timeout)
        except RuntimeError as error:
            # gloo's threads live as long as its works, which this frame's traceback would hold.
            self._error, self._works, work = error, [], None
        finally:
            del _waits_in[here]
            self._connections.release(self)

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return self._error is None and all(work.is_success() for work in self._works)

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> list[torch.Tensor]:
        return [tensor for work in self._works for tensor in work.result()]

    def _source_rank(self) -> int:
        return self._works[0]._source_rank() if self._works else -1

    def get_future(self) -> torch.futures.Future:
        """gloo's: torch's DDP waits for it inside C++. It ends in an error with gloo's connections."""
        self.awaited = True
        futures = [work.get_future() for work in self._works]
        return futures[0] if len(futures) == 1 else torch.futures.collect_all(futures)


def wait_in_store(store: dist.Store, keys: list[str], timeout: datetime.timedelta, call: dict[str, Any]) -> None:
    """Wait until other ranks have set `keys`, in turns: between two of them a Stop ends it."""
    __tracebackhide__ = True
    end, here = time.monotonic() + timeout.total_seconds(), threading.get_ident()
    _waits_in[here] = call
    try:
        while True:
            try:
                return store.wait(keys, datetime.timedelta(seconds=_TURN))
            except RuntimeError as error:  # what a store raises after that time depends on its kind
                if isinstance(error, dist.DistNetworkError) or time.monotonic() > end:
                    raise
    finally:
        del _waits_in[here]


def _store_barrier(
    rank: int, store: dist.Store, group_name: str, count: int, timeout: datetime.timedelta, *_: Any, **__: Any
) -> None:
    """In place of torch's, with which `new_group` ends: it waits for `count` ranks, also those outside of the group."""
    __tracebackhide__ = True
    if store.add(f"barrier {group_name}", 1) == count:
        store.set(f"barrier {group_name} is over", "")
    wait_in_store(store, [f"barrier {group_name} is over"], timeout, make_call("new_group", group_name))


dist.distributed_c10d._store_based_barrier = _store_barrier


# gloo's connections to the other ranks


class Connections:
    """The TCP sockets that gloo has opened in this process while `make` ran. `made` is what it returned.

    `works`: what it does at present (see `InterruptibleGroup.under_way`). `messages`: the last that nobody waited for.

    gloo can't abort an operation. But a wait ends at once, in an error, when the connection it waits for is closed.
    Then nobody holds the group any more, and gloo gives its threads and descriptors back.
    """

    def __init__(self, make: Callable[[], Any]):
        self.ended = False
        self.works: set[InterruptibleWork] = set()
        self.messages: deque[InterruptibleWork] = deque(maxlen=_MESSAGES)
        before = _sockets()
        self.made = make()
        self._sockets = _sockets() - before

    def release(self, work: InterruptibleWork) -> None:
        """Its end was waited for: its tensors need not be held."""
        self.works.discard(work)
        if work in self.messages:
            self.messages.remove(work)

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
