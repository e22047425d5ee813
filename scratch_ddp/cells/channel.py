"""Messages between the kernel, the launcher and the ranks: JSON over Unix socket pairs.

A socket pair has no address: nobody can connect to it, so there is nothing to authenticate and nothing to unpickle.
When a process ends, its peers read end-of-file at once, which is how everybody learns of everybody's death.
"""

import array
import contextlib
import json
import socket
import struct
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

_LENGTH = struct.Struct("!I")
_CHUNK = 1 << 16
_MOST_FILES = 8  # open files that one message may carry


class Link:
    """One end of a socket pair. A message is a dict; open files may travel with it (as file descriptors)."""

    def __init__(self, sock: socket.socket):
        self.socket = sock
        self.files: deque[int] = deque()  # descriptors that arrived, in the order of the messages that carry them
        self._received = bytearray()
        self._sending = threading.Lock()  # a rank's main thread and its control thread both send

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, message: dict[str, Any], files: Sequence[int] = ()) -> None:
        """Send a message. Raises OSError (BrokenPipeError) if the other end is gone."""
        body = json.dumps(message).encode()
        frame = _LENGTH.pack(len(body)) + body
        with self._sending:
            if files:
                rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))
                sent = self.socket.sendmsg([frame], [rights])
                frame = frame[sent:]
            self.socket.sendall(frame)

    def receive(self) -> list[dict[str, Any]]:
        """Wait for bytes and return the messages that are complete by now. Raises EOFError when the peer is gone."""
        try:
            data, files, _, _ = socket.recv_fds(self.socket, _CHUNK, _MOST_FILES)
        except ConnectionResetError:
            data, files = b"", []
        if not data:
            raise EOFError("the other end of the link is gone")
        self.files.extend(files)
        self._received += data
        messages = []
        while len(self._received) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._received)
            end = _LENGTH.size + length
            if len(self._received) < end:
                break
            messages.append(json.loads(self._received[_LENGTH.size : end]))
            del self._received[:end]
        return messages

    def take_files(self, count: int) -> list[int]:
        """The next `count` descriptors that arrived; the caller owns them now."""
        return [self.files.popleft() for _ in range(count)]

    def close_for_good(self) -> None:
        """End the connection itself: the peer reads end-of-file even if a child of this process holds a copy."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.close()


def link_pair() -> tuple[Link, socket.socket]:
    """A link for this process, and the bare socket that becomes the other process's end."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    return Link(here), there
