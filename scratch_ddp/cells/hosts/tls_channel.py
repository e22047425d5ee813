"""A channel to another host: JSON messages over TLS. In place of `channel.Channel`, but no files travel with it."""

import contextlib
import errno
import json
import os
import select
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from scratch_ddp.cells.channel import encode, take_messages

_CHUNK = 1 << 16
_MOST_AT_ONCE = 1 << 20  # bytes that `receive` takes before it returns
_SILENCE = 5  # seconds after which a host that answers nothing counts as lost
_SEND_LIMIT = 10.0  # the same for one whose TCP answers, but which does not read
_NO_ANSWER = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN)


class TlsChannel:
    """One end of a connection whose handshake is over. Two threads may use it: one that receives, others that send."""

    def __init__(self, sock: ssl.SSLSocket):
        self.socket = sock
        self._received = bytearray()
        self._silent = False  # the other host was lost without a word
        self._send_lock = threading.Lock()  # held for a whole message
        self._tls_lock = threading.Lock()  # held for a call of OpenSSL, whose objects serve one thread at a time
        _notice_silence(sock)
        sock.setblocking(False)

    def fileno(self) -> int:
        return self.socket.fileno()

    @property
    def own_address(self) -> str:
        return self.socket.getsockname()[0]

    def send(self, message: dict[str, Any], files: Sequence[int] = ()) -> None:
        """Send a message. If the other host is gone it is lost; `receive` tells of that."""
        left = memoryview(encode(message))
        with self._send_lock:
            try:
                while left:
                    left = left[self._when_ready(self.socket.send, left[:_CHUNK]) :]
            except (OSError, ValueError) as error:  # lost; or closed by the thread that receives
                self._note_silence(error)
                self.shut_down()  # nobody could read what follows half a message

    def receive(self) -> list[dict[str, Any]]:
        """Wait for bytes and return the complete messages. Raises EOFError, which says how the host was lost."""
        try:
            data = self._when_ready(self.socket.recv, _CHUNK, limit=None)
            while data:
                self._received += data
                if len(self._received) > _MOST_AT_ONCE or not self._buffered():
                    return take_messages(self._received)
                data = self._when_ready(self.socket.recv, _CHUNK, limit=None)
        except OSError as error:
            self._note_silence(error)
        except (json.JSONDecodeError, UnicodeDecodeError):
            pass
        raise EOFError("no longer answers" if self._silent else "has ended")

    def _note_silence(self, error: Exception) -> None:
        """The system tells only one thread, the first to send or to receive, that the other host does not answer."""
        if isinstance(error, OSError) and (isinstance(error, TimeoutError) or error.errno in _NO_ANSWER):
            self._silent = True

    def _buffered(self) -> int:
        """Bytes that OpenSSL has read from the socket already, so that nobody would wake us for them."""
        with self._tls_lock:
            return self.socket.pending()

    def _when_ready(self, action: Callable[[Any], Any], argument: Any, limit: float | None = _SEND_LIMIT) -> Any:
        while True:
            try:
                with self._tls_lock:
                    return action(argument)
            except ssl.SSLWantReadError:
                self._wait(select.POLLIN, limit)
            except ssl.SSLWantWriteError:
                self._wait(select.POLLOUT, limit)

    def _wait(self, what: int, limit: float | None) -> None:
        poll = select.poll()
        poll.register(self.socket, what)
        ready = poll.poll(None if limit is None else limit * 1000)
        if not ready:
            raise TimeoutError(f"nothing was sent for {limit:g} s")
        if ready[0][1] & select.POLLERR and (code := self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)):
            raise OSError(code, os.strerror(code))  # the ssl module would turn it into a plain end

    def end_sending(self) -> None:
        """The other end reads what was sent, then end-of-file."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self.socket, socket.SHUT_WR)  # SSLSocket.shutdown would go on without TLS

    def shut_down(self) -> None:
        """End the connection; a thread that waits in `receive` sees it."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self.socket, socket.SHUT_RDWR)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.close()


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
