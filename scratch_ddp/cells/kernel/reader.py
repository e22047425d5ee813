"""The kernel's thread that reads what ranks and launcher send, at all times, so that no rank blocks on a full pipe."""

import contextlib
import os
import queue
import selectors
import threading
from dataclasses import dataclass
from typing import Any

from scratch_ddp.cells.channel import Channel

_CHUNK = 1 << 16


@dataclass(frozen=True)
class Pipe:
    """The read end of a rank's stdout (1) or stderr (2) in one cell."""

    rank: Any  # the RankProcess that writes to it
    cell: int
    stream: int


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
        self._selector = selectors.DefaultSelector()
        self._wake, self._waker = os.pipe()
        os.set_blocking(self._wake, False)
        self._new: queue.SimpleQueue = queue.SimpleQueue()
        self._selector.register(self._wake, selectors.EVENT_READ)
        threading.Thread(target=self._run, name="reads-from-ranks", daemon=True).start()

    def open_pipes(self, rank: Any, cell: int) -> tuple[int, int]:
        """Pipes for a rank's stdout and stderr in a cell. Returns their write ends, which the caller must close."""
        ends = []
        for stream in (1, 2):
            read_end, write_end = os.pipe()
            os.set_blocking(read_end, False)
            self._add(read_end, Pipe(rank, cell, stream))
            ends.append(write_end)
        return ends[0], ends[1]

    def add_channel(self, channel: Channel, source: Any) -> None:
        """Read a channel. When its other end is closed, this thread calls `source.on_gone`."""
        self._add(channel, source)

    def _add(self, file: Any, source: Any) -> None:
        self._new.put((file, source))
        os.write(self._waker, b".")

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj == self._wake:
                    self._take_new()
                elif isinstance(key.data, Pipe):
                    self._read_pipe(key)
                elif key.fd in self._selector.get_map():
                    self._read_channel(key)

    def _take_new(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake, 4096)
        with contextlib.suppress(queue.Empty):
            while True:
                file, source = self._new.get_nowait()
                self._selector.register(file, selectors.EVENT_READ, source)

    def _read_channel(self, key: selectors.SelectorKey) -> None:
        try:
            messages = key.fileobj.receive()
        except (EOFError, OSError):
            self._drain(key.data)
            self._selector.unregister(key.fileobj)
            key.fileobj.close()
            key.data.on_gone()
            self._events.put(Event("gone", key.data))
            return
        for message in messages:
            if message["type"] in ("done", "input"):
                self._drain(key.data)
            self._events.put(Event("message", key.data, message))

    def _drain(self, rank: Any) -> None:
        """Read all that a rank has written into its pipes before it sent the message that was just read."""
        self._take_new()
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, Pipe) and key.data.rank is rank:
                while self._read_pipe(key):
                    pass

    def _read_pipe(self, key: selectors.SelectorKey) -> bool:
        """Read a chunk. Returns whether there may be more."""
        registered = self._selector.get_map().get(key.fd)
        if registered is None or registered.data is not key.data:  # closed since; another file may have its number
            return False
        try:
            data = os.read(key.fd, _CHUNK)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if data:
            self._events.put(Event("text", key.data, data))
            return True
        self._selector.unregister(key.fd)
        with contextlib.suppress(OSError):
            os.close(key.fd)
        return False
