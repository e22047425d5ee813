"""A channel to another host: JSON messages over TLS. No files travel with them."""

import contextlib
import select
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from scratch_ddp.cells.channel import Channel, encode, take_messages

_CHUNK = 1 << 16
_SILENCE = 5  # seconds after which a host that answers nothing counts as lost
_SEND_LIMIT = 10.0  # the same for one whose TCP answers, but which does not read


class TlsChannel(Channel):
    """One end of a connection whose handshake is over. Two threads may use it: one that receives, others that send."""

    def __init__(self, sock: ssl.SSLSocket):
        super().__init__(sock)
        self._tls_lock = threading.Lock()  # held for a call of OpenSSL, whose objects serve one thread at a time
        _notice_silence(sock)
        sock.setblocking(False)

    def send(self, message: dict[str, Any], files: Sequence[int] = ()) -> None:
        """Send a message. If the other host is gone it is lost; `receive` tells of that."""
        left = memoryview(encode(message))
        with self._send_lock:
            try:
                while left:
                    left = left[self._when_ready(self.socket.send, left[:_CHUNK], _SEND_LIMIT) :]
            except (OSError, ValueError):  # lost; or closed by the thread that receives
                self.shut_down()  # nobody could read what follows half a message

    def receive(self) -> list[dict[str, Any]]:
        """Wait for bytes and return the complete messages. Raises EOFError if the other host is lost."""
        with contextlib.suppress(OSError, ValueError):
            if data := self._when_ready(self.socket.recv, _CHUNK, None):
                self._received += data
                return take_messages(self._received)
        raise EOFError("the connection has ended")

    def _when_ready(self, action: Callable[[Any], Any], argument: Any, limit: float | None) -> Any:
        while True:
            try:
                with self._tls_lock:
                    return action(argument)
            except ssl.SSLWantReadError:
                what = select.POLLIN
            except ssl.SSLWantWriteError:
                what = select.POLLOUT
            poll = select.poll()
            poll.register(self.socket, what)
            if not poll.poll(limit and limit * 1000):
                raise TimeoutError(f"nothing was sent for {limit:g} s")

    def end_sending(self) -> None:
        """The other end reads what was sent, then end-of-file."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self.socket, socket.SHUT_WR)


def _notice_silence(sock: socket.socket) -> None:
    """A host that has vanished without a word (cable, power) ends the connection after about `_SILENCE` seconds.

    The operating system asks and answers, so a process that is busy counts as present.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {"TCP_NODELAY": 1, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": _SILENCE, "TCP_USER_TIMEOUT": _SILENCE * 1000}
    options["TCP_KEEPALIVE" if sys.platform == "darwin" else "TCP_KEEPIDLE"] = 1
    for name, value in options.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
