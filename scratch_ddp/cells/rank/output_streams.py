"""The rank's stdout and stderr: pipes to the kernel.

A rank's descriptors 1 and 2 are pipes to the kernel, new ones for each cell. So all that is written to them (by Python,
C code, a child process) arrives, even when the rank dies in the next instant, and the pipe tells which cell late text
comes from. A mark goes into both pipes at each change between stdout, stderr and displays: the kernel restores their
order from the marks (see `kernel/output.py`).
"""

import contextlib
import ctypes
import io
import os
import sys
import threading
from typing import Any

_OUT, _ERR = 1, 2
_libc = ctypes.CDLL(None)


class CellPipes:
    """The pipes of one cell. Threads that the cell starts go on writing to them after it has ended."""

    def __init__(self, out: int, err: int, mark: bytes, cell: int = 0):
        self.cell = cell
        self._files = {_OUT: out, _ERR: err}
        self._mark = mark
        self._primary = _OUT
        self._segment = 0
        self._lock = threading.RLock()

    def __del__(self) -> None:
        for file in self._files.values():
            with contextlib.suppress(OSError):
                os.close(file)

    def write(self, stream: int, data: bytes) -> None:
        with self._lock:
            if stream != self._primary and not _forked:
                self._begin(stream)
            _write_all(self._files[stream], data)

    def begin_display(self) -> int:
        """Begin a segment with a display, which comes after all that was written so far. Returns its number."""
        with self._lock:
            self.flush_c()
            self._begin(self._primary, b"d")
            return self._segment

    def _begin(self, stream: int, display: bytes = b"") -> None:
        """Begin a segment: from here on the text in both pipes comes after all that was written before."""
        self._segment += 1
        self._primary = stream
        mark = b"\0%s %d %d%s\0" % (self._mark, self._segment, stream, display)
        _write_all(self._files[_OUT], mark)
        _write_all(self._files[_ERR], mark)

    @staticmethod
    def flush_c() -> None:
        """Write out what C code holds in its buffers (it knows only descriptors 1 and 2)."""
        _libc.fflush(None)

    def take_descriptors(self) -> None:
        """Make these pipes the process's descriptors 1 and 2."""
        self.flush_c()
        os.dup2(self._files[_OUT], 1)
        os.dup2(self._files[_ERR], 2)


def _write_all(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


class RankStream(io.TextIOBase):
    """sys.stdout or sys.stderr of a rank: writes at once, to the pipes of the cell that started the current thread."""

    encoding = "utf-8"
    errors = "backslashreplace"

    def __init__(self, stream: int):
        self._stream = stream
        self.name = "<stdout>" if stream == _OUT else "<stderr>"

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        current_pipes().write(self._stream, text.encode(self.encoding, self.errors))
        return len(text)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._stream  # for subprocesses and faulthandler


_current: CellPipes | None = None
_forked = False  # this process is a child of the rank. It begins no segment: two processes can't share the numbers
_start_thread = threading.Thread.start


def current_pipes() -> CellPipes:
    """The pipes of the cell that this thread was started in; of the running cell for the main thread."""
    return getattr(threading.current_thread(), "_cell_pipes", None) or _current


def is_forked() -> bool:
    """Whether this process is a child that a cell has forked."""
    return _forked


def _after_fork() -> None:
    global _forked
    _forked = True
    if _current is not None:
        _current._lock = threading.RLock()  # another thread may have held it


def begin_cell(pipes: CellPipes) -> None:
    """From here on the rank writes to these pipes, from Python and from C."""
    global _current
    restore_streams()
    _current = pipes
    pipes.take_descriptors()


def restore_streams() -> list[str]:
    """Put the rank's own sys.stdout and sys.stderr back. Returns the names of those that a cell had replaced."""
    replaced = [name for name, own in _own.items() if getattr(sys, name) is not own]
    for name in replaced:
        setattr(sys, name, _own[name])
    return replaced


def _start_in_cell(thread: threading.Thread, *args: Any, **kwargs: Any) -> None:
    if not getattr(thread, "belongs_to_no_cell", False):
        thread._cell_pipes = current_pipes()
    _start_thread(thread, *args, **kwargs)


_own = {"stdout": RankStream(_OUT), "stderr": RankStream(_ERR)}


def install(pipes: CellPipes) -> None:
    """Take over sys.stdout and sys.stderr of this process."""
    threading.Thread.start = _start_in_cell
    os.register_at_fork(after_in_child=_after_fork)
    begin_cell(pipes)
