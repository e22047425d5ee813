"""Messages between the kernel, the launcher and the ranks: JSON over Unix socket pairs.

A socket pair has no address. Nobody else can connect to it, so it needs no password, and no message is unpickled.
When a process ends, the other end of its channel reads end-of-file at once. That is how every death is noticed.
"""

import array
import contextlib
import json
import os
import socket
import struct
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

_LENGTH = struct.Struct("!I")
_CHUNK = 1 << 16
_MAX_FILES = 8  # file descriptors in one message


class Channel:
    """One end of a socket pair. A message is a dict; file descriptors may travel with it.

    `errors`: what is sent for a lone surrogate (half a character), "surrogatepass" or "replace".
    """

    def __init__(self, sock: socket.socket, errors: str = "surrogatepass"):
        self.socket = sock
        self._errors = errors
        self._files: deque[int] = deque()  # descriptors that have arrived, in the order of their messages
        self._received = bytearray()
        self._send_lock = threading.Lock()  # a rank's main thread and its control thread both send

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, message: dict[str, Any], files: Sequence[int] = ()) -> None:
        """Send a message. If the other end is closed it is lost; `receive` tells of that."""
        frame = encode(message, self._errors)
        with self._send_lock, contextlib.suppress(OSError):
            if files:
                rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))
                sent = self.socket.sendmsg([frame], [rights])
                frame = frame[sent:]
            self.socket.sendall(frame)

    def receive(self) -> list[dict[str, Any]]:
        """Wait for bytes and return the messages that are complete. Raises EOFError when the other end is closed."""
        try:
            data, files, flags, _ = socket.recv_fds(self.socket, _CHUNK, _MAX_FILES)
        except ConnectionResetError:
            data, files, flags = b"", [], 0
        if not data:
            raise EOFError("the other end of the channel is closed")
        if flags & socket.MSG_CTRUNC:  # this process has not enough free descriptors
            while files:
                os.close(files.pop())
        for file in files:
            os.set_inheritable(file, False)  # a program that a cell starts must not hold the pipes of its cell
        self._files.extend(files)
        self._received += data
        return take_messages(self._received)

    def take_files(self, count: int) -> list[int]:
        """The next `count` descriptors that have arrived, or none. The caller must close them."""
        return [self._files.popleft() for _ in range(min(count, len(self._files)))]

    def shut_down(self) -> None:
        """End the connection: the other end reads end-of-file even if a child of this process holds a copy of ours."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.close()


def encode(message: dict[str, Any], errors: str = "surrogatepass") -> bytes:
    """A message as bytes: its length and its JSON."""
    body = json.dumps(message, ensure_ascii=False).encode(errors=errors)
    return _LENGTH.pack(len(body)) + body


def take_messages(received: bytearray) -> list[dict[str, Any]]:
    """Take the complete messages out of what has been received."""
    messages = []
    while len(received) >= _LENGTH.size:
        (length,) = _LENGTH.unpack_from(received)
        end = _LENGTH.size + length
        if len(received) < end:
            break
        messages.append(json.loads(received[_LENGTH.size : end]))
        del received[:end]
    return messages


def channel_pair() -> tuple[Channel, socket.socket]:
    """A channel for this process, and the bare socket that becomes the other process's end."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    return Channel(ours), theirs
