"""The kernel's thread that reads what ranks and launcher send.

Messages are read at all times. Output is read only while not too much of it waits to be taken: a rank that writes
faster than that waits, as any process does whose pipe is full. So no rank can fill the kernel's memory.
"""

import fcntl
import os
import queue
import selectors
import struct
import termios
import threading
import time
from dataclasses import dataclass
from typing import Any

from scratch_ddp.cells.channel import Channel

_CHUNK = 1 << 16
_MOST_AHEAD = 1 << 21  # bytes that may have been read and not been taken
_EVENT_BYTES = 256  # what an event takes beside its text
_LOOK_AGAIN = 0.005  # seconds, while as many have


@dataclass(eq=False)
class Pipe:
    """The read end of the pipe to which a rank writes in one cell. On another host its agent has it."""

    rank: Any  # the RankProcess that writes to it
    cell: int
    reader: Any  # the Reader, or the Host
    file: int = -1


@dataclass(frozen=True)
class Event:
    """Something that has arrived: `kind` is "message" or "text" (its `value`), or "gone"; `source` is where from."""

    kind: str
    source: Any
    value: Any = None


class Reader:
    """Puts events into `events`. All of a rank's text in a cell comes before its message that the cell is done."""

    def __init__(self, events: "queue.SimpleQueue[Event]"):
        self._events = events
        self.read = self.taken = 0  # bytes of text; each is counted by one thread
        self._selector = selectors.DefaultSelector()  # epoll and kqueue take files while another thread waits
        self._pipes: set[Pipe] = set()  # all that are open
        threading.Thread(target=self._run, name="reads-from-ranks", daemon=True).start()

    def open_pipe(self, rank: Any, cell: int) -> int:
        """A pipe for a rank's output in a cell. Returns its write end, which the caller must close."""
        read_end, write_end = os.pipe()
        os.set_blocking(read_end, False)
        self.add(read_end, Pipe(rank, cell, self, read_end))
        return write_end

    def add(self, file: Channel | int, source: Any) -> None:
        """Read a channel, or a pipe. When a channel's other end is closed, this thread calls `source.on_gone`."""
        self._selector.register(file, selectors.EVENT_READ, source)
        if isinstance(source, Pipe):
            self._pipes.add(source)

    def note_taken(self, size: int) -> None:
        """An event with so many bytes of text has been taken: as much may be read again."""
        self.taken += size + _EVENT_BYTES

    def _run(self) -> None:
        while True:
            waits = False
            for key, _ in self._selector.select():
                if not isinstance(key.data, Pipe):
                    self._read_channel(key)
                elif self.read - self.taken < _MOST_AHEAD:
                    self._read_pipe(key.data)
                else:
                    waits = True
            if waits:
                time.sleep(_LOOK_AGAIN)

    def _read_channel(self, key: selectors.SelectorKey) -> None:
        try:
            messages = key.fileobj.receive()
        except (EOFError, OSError):
            for pipe in self._drain(key.data):
                self._close(pipe)
            self._selector.unregister(key.fileobj)
            key.fileobj.close()
            key.data.on_gone()
            self._events.put(Event("gone", key.data))
            return
        for message in messages:
            if message["type"] == "done":
                self._drain(key.data)
            self._events.put(Event("message", key.data, message))

    def _drain(self, rank: Any) -> list[Pipe]:
        """Read what a rank has written before it sent the message that was just read: all that its pipes hold now.

        A process that the rank has started may go on writing without end.
        """
        pipes = [pipe for pipe in list(self._pipes) if pipe.rank is rank]
        for pipe in pipes:
            left = _held_by(pipe.file)
            while left > 0:
                left -= self._read_pipe(pipe, min(left, _CHUNK))
        return pipes

    def _read_pipe(self, pipe: Pipe, most: int = _CHUNK) -> int:
        """Read a chunk. Returns its length."""
        if pipe not in self._pipes:  # closed since the selector has named it
            return 0
        try:
            data = os.read(pipe.file, most)
        except BlockingIOError:  # read since then
            return 0
        if not data:
            self._close(pipe)
            return 0
        self.read += len(data) + _EVENT_BYTES
        self._events.put(Event("text", pipe, data))
        return len(data)

    def _close(self, pipe: Pipe) -> None:
        self._pipes.discard(pipe)
        self._selector.unregister(pipe.file)
        os.close(pipe.file)


def _held_by(file: int) -> int:
    """How many bytes a pipe holds."""
    return struct.unpack("i", fcntl.ioctl(file, termios.FIONREAD, b"\0" * 4))[0]
