"""Messages between the kernel, the launcher, the ranks and the agents of other hosts: JSON, with its length before it.

On one machine they travel over Unix socket pairs. A socket pair has no address. Nobody else can connect to it, so it
needs no password, and no message is unpickled. When a process ends, the other end of its channel reads end-of-file at
once. That is how every death is noticed. Between hosts it is TLS (`hosts/tls_channel.py`).

`PROTOCOL` lists every message. Each has a "type", the fields that stand here, and no others.
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

PROTOCOL = {
    # type: (from → to, fields)
    # The launcher
    "launcher ready": ("launcher → kernel", "gpu_count"),
    # `process`: the number of a rank's process, which stands in its config
    "start": ("kernel → launcher", "config"),  # files: socket, output
    "end": ("kernel → launcher", "process"),
    "ended": ("launcher → kernel", "process status crash calls"),
    # A cell. `cell` is our number of it, `number` the notebook's
    "ready": ("rank → kernel", "device pid"),
    "execute": ("kernel → rank", "cell number code"),  # file: output
    "done": ("rank → kernel", "cell error interrupted_in calls open begun members"),
    # Where a rank is; Stop (see `rank/stop.py`)
    "query_state": ("kernel → rank", "cell"),
    "state": ("rank → kernel", "cell line waits_in stopping asked caught calls open begun members"),
    "hold": ("kernel → rank", "cell until"),
    "place": ("rank → kernel", "cell held calls gap begun members"),
    "interrupt": ("kernel → rank", "cell number together end"),
    "renew": ("kernel → rank", "generation timeout"),
    "renewed": ("rank → kernel", "retired? error?"),
    # Between cells: completion, inspection, open calls
    "ask": ("kernel → rank", "number kind code? cursor? detail?"),
    "answer": ("rank → kernel", "number found"),
    # Ranks on other hosts, whose agents pass "start" and "end" on. (An agent's first line is no message.)
    "refused": ("kernel → agent", "why"),
    "welcome": ("kernel → agent", ""),
    "to": ("kernel → agent", "process message"),  # for the rank
    "from": ("agent → kernel", "process message"),  # from the rank, or from the launcher (None)
    "text": ("agent → kernel", "process cell data"),
    "taken": ("kernel → agent", "size"),  # so much text
    "gone": ("agent → kernel", "process"),
    "let go": ("kernel → agent", ""),
    "store": ("rank → kernel", "number operation arguments"),
    "stored": ("kernel → rank", "number answer"),
}
_LENGTH = struct.Struct("!I")
_CHUNK = 1 << 16
_MAX_FILES = 8  # file descriptors in one message


class Channel:
    """One end of a socket pair. A message is a dict; file descriptors may travel with it."""

    def __init__(self, sock: socket.socket):
        self.socket = sock
        self._files: deque[int] = deque()  # descriptors that have arrived, in the order of their messages
        self._received = bytearray()
        self._send_lock = threading.Lock()  # a rank's main thread and its control thread both send

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, message: dict[str, Any], files: Sequence[int] = ()) -> None:
        """Send a message. If the other end is closed it is lost; `receive` tells of that."""
        frame = encode(message)
        with self._send_lock, contextlib.suppress(OSError):
            if files:
                rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))
                sent = self.socket.sendmsg([frame], [rights])
                frame = frame[sent:]
            self.socket.sendall(frame)

    def receive(self) -> list[dict[str, Any]]:
        """Wait for bytes and return the messages that are complete. Raises EOFError when the other end is closed."""
        try:
            data, files, *_ = socket.recv_fds(self.socket, _CHUNK, _MAX_FILES)
        except ConnectionResetError:
            data, files = b"", []
        if not data:
            raise EOFError("the other end of the channel is closed")
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
            socket.socket.shutdown(self.socket, socket.SHUT_RDWR)  # that of TLS would go on without TLS

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.close()


def encode(message: dict[str, Any]) -> bytes:
    """A message as bytes: its length and its JSON. Half a character, which no notebook can show, becomes "?".

    Raises ValueError for a message that is not in the table.
    """
    fields = PROTOCOL[message["type"]][1].split()
    needed = {"type", *(field for field in fields if not field.endswith("?"))}
    if not needed <= message.keys() <= needed | {field.rstrip("?") for field in fields}:
        raise ValueError(f"{message['type']!r} has the fields {fields}, not {list(message)}")
    body = json.dumps(message, ensure_ascii=False).encode(errors="replace")
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
