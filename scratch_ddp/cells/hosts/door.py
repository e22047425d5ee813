"""The kernel's listening socket. It is open while hosts are awaited; who knows the ticket's secret may enter.

Every connection has a thread and a few seconds to show the secret. If there are too many at once, those go that have
taken longest: a host that holds the ticket needs milliseconds.
"""

import contextlib
import hmac
import json
import queue
import socket
import ssl
import struct
import threading
import time
from typing import Any

import psutil

from scratch_ddp.cells.hosts.certificate import make_server_context
from scratch_ddp.cells.hosts.ticket import Ticket
from scratch_ddp.cells.hosts.tls_channel import TlsChannel

_HELLO_LIMIT = 5.0  # seconds from the connection to the secret
_LONGEST_HELLO = 4096  # bytes
_MOST_STRANGERS = 64  # connections at a time that have not shown the secret yet
_LENGTH = struct.Struct("!I")


class Door:
    """Listens at `address`. `arrivals` gets (channel, hello) of each host with the ticket, until the door is closed.

    Raises OSError if the machine has no such address or the port is taken.
    """

    def __init__(self, address: str, port: int = 0):
        family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        self._socket = socket.create_server(place[:2], family=family, backlog=128)
        try:
            self._context, fingerprint = make_server_context()
        except BaseException:
            self._socket.close()
            raise
        self._socket.settimeout(0.2)
        self.ticket = Ticket(*self._socket.getsockname()[:2], fingerprint)
        self.arrivals: queue.SimpleQueue[tuple[TlsChannel, dict[str, Any]]] = queue.SimpleQueue()
        self.strangers = 0  # connections that did not show the secret
        self._unknown: dict[socket.socket, float] = {}  # connection → when it was made, oldest first
        self._lock = threading.Lock()
        self._closed = False
        threading.Thread(target=self._accept, name="accepts-hosts", daemon=True).start()

    def close(self) -> None:
        """Let nobody in any more. The ticket is worthless from here on."""
        with self._lock:
            self._closed = True
            for connection in self._unknown:
                _end(connection)
        _end(self._socket)
        self._socket.close()
        with contextlib.suppress(queue.Empty):
            while True:
                channel, _ = self.arrivals.get_nowait()
                refuse(channel, "all hosts that the notebook waited for have come before this one")

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._socket.accept()
            except TimeoutError:
                continue
            except OSError:  # closed; or too many files are open, which passes
                time.sleep(0.1)
                continue
            with self._lock:
                self._unknown[connection] = time.monotonic()
                if len(self._unknown) > _MOST_STRANGERS:
                    _end(next(iter(self._unknown)))
            threading.Thread(target=self._greet, args=(connection,), name="greets-a-host", daemon=True).start()

    def _greet(self, connection: socket.socket) -> None:
        """Let the connection in if it shows the secret in time."""
        until = time.monotonic() + _HELLO_LIMIT
        try:
            connection.settimeout(_HELLO_LIMIT)
            sock = self._context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
            with self._lock:
                self._unknown[sock] = self._unknown.pop(connection, until)
            connection = sock
            sock.do_handshake()
            hello = _receive_hello(sock, until)
            if not hmac.compare_digest(str(hello.pop("secret")).encode(), self.ticket.secret.encode()):
                raise ValueError("another secret")
        except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            with self._lock:
                self._unknown.pop(connection, None)
                self.strangers += 1
            connection.close()
            return
        with self._lock:
            self._unknown.pop(connection, None)
            if not self._closed:
                self.arrivals.put((TlsChannel(sock), hello))
                return
        connection.close()


def refuse(channel: TlsChannel, why: str) -> None:
    """Send a host away, with the reason."""
    channel.send({"type": "refused", "why": why})
    channel.end_sending()
    channel.close()


def own_addresses() -> list[str]:
    """The IPv4 addresses of this machine, loopback last."""
    addresses = {
        each.address for of_one in psutil.net_if_addrs().values() for each in of_one if each.family == socket.AF_INET
    }
    return sorted(addresses, key=lambda address: (address.startswith("127."), address))


def _receive_hello(sock: ssl.SSLSocket, until: float) -> dict[str, Any]:
    (length,) = _LENGTH.unpack(_receive_exactly(sock, _LENGTH.size, until))
    if length > _LONGEST_HELLO:
        raise ValueError("too long for a hello")
    return json.loads(_receive_exactly(sock, length, until))


def _receive_exactly(sock: ssl.SSLSocket, count: int, until: float) -> bytes:
    data = b""
    while len(data) < count:
        sock.settimeout(max(0.001, until - time.monotonic()))
        more = sock.recv(count - len(data))
        if not more:
            raise EOFError
        data += more
    return data


def _end(connection: socket.socket) -> None:
    """Wake the thread that reads from a connection: it finds it closed."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
