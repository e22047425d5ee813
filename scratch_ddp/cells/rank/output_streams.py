"""The rank's stdout and stderr: a pipe to the kernel.

A rank's descriptors 1 and 2 are a pipe to the kernel, a new one for each cell. So all that is written to them (by
Python, C code, a child process) arrives in its order, even when the rank dies in the next instant, and the pipe tells
which cell late text comes from. Marks stand around what Python writes to sys.stderr, and hold the pieces of displays
(see `kernel/output.py`). What C code and child processes write to descriptor 2 can't be told from their output.

Others may write to the same pipe at any moment: children, C threads. So each mark is a write of its own, of at most
PIPE_BUF bytes, which nothing can break.
"""

import contextlib
import ctypes
import io
import json
import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

_OUT, _ERR = 1, 2
_FRAME = 128  # bytes of a mark, at most, without the piece that it holds
_libc = ctypes.CDLL(None)


class CellPipe:
    """The pipe of one cell. Threads that the cell starts go on writing to it after it has ended."""

    def __init__(self, file: int, mark: bytes):
        self._file, self._mark = file, mark
        self._lock = threading.RLock()
        self._displays = 0

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._file)

    def write(self, stream: int, data: bytes) -> None:
        with self._lock:
            if stream == _OUT:
                _write_all(self._file, data)
                return
            try:
                self._write_mark(b"s%d" % _ERR)
                _write_all(self._file, data)
            finally:  # also after an interrupt
                self._write_mark(b"s%d" % _OUT)

    def display(self, display: dict[str, Any]) -> None:
        """Show {"data": …, "metadata": …} after all that was written so far."""
        body = json.dumps(display, ensure_ascii=False).encode(errors="replace")  # half a character becomes "?"
        with self._lock, uninterrupted():
            self.flush_c()
            self._displays += 1
            name = b"%d.%d" % (os.getpid(), self._displays)  # a forked child goes on with the same number
            size = select.PIPE_BUF - _FRAME
            for start in range(0, len(body), size):
                self._write_mark(b"d%s %s" % (name, body[start : start + size]))
            self._write_mark(b"e%s" % name)

    def _write_mark(self, what: bytes) -> None:
        _write_all(self._file, b"\0%s %s\0" % (self._mark, what))

    @staticmethod
    def flush_c() -> None:
        """Write out what C code holds in its buffers (it knows only descriptors 1 and 2)."""
        _libc.fflush(None)

    def take_descriptors(self) -> None:
        """Make this pipe the process's descriptors 1 and 2."""
        self.flush_c()
        os.dup2(self._file, 1)
        os.dup2(self._file, 2)


def _write_all(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """A Stop waits until the block is over: the kernel could not read what follows half a message."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class RankStream(io.TextIOBase):
    """sys.stdout or sys.stderr of a rank: writes at once, to the pipe of the cell that started the current thread."""

    encoding = "utf-8"
    errors = "backslashreplace"

    def __init__(self, stream: int):
        self._stream = stream

    def write(self, text: str) -> int:
        current_pipe().write(self._stream, text.encode(self.encoding, self.errors))
        return len(text)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._stream  # for subprocesses and faulthandler


_stdout, _stderr = RankStream(_OUT), RankStream(_ERR)
_current: CellPipe | None = None
_start_thread = threading.Thread.start


def current_pipe() -> CellPipe:
    """The pipe of the cell that this thread was started in; of the running cell for the main thread."""
    return getattr(threading.current_thread(), "_cell_pipe", None) or _current


def _after_fork() -> None:
    if _current is not None:
        _current._lock = threading.RLock()  # another thread may have held it


def begin_cell(pipe: CellPipe) -> None:
    """From here on the rank writes to this pipe, from Python and from C, whatever the last cell did to sys.stdout."""
    global _current
    _current = pipe
    sys.stdout, sys.stderr = _stdout, _stderr
    pipe.take_descriptors()


def _start_in_cell(thread: threading.Thread, *args: Any, **kwargs: Any) -> None:
    if not getattr(thread, "belongs_to_no_cell", False):
        thread._cell_pipe = current_pipe()
    _start_thread(thread, *args, **kwargs)


def install(pipe: CellPipe) -> None:
    """Take over sys.stdout and sys.stderr of this process."""
    threading.Thread.start = _start_in_cell
    os.register_at_fork(after_in_child=_after_fork)
    begin_cell(pipe)
