"""The door through which hosts join a notebook: the ticket, the listening socket, and who is let in.

The socket is open while hosts are awaited. No authority vouches for its certificate: the fingerprint stands in the
ticket, beside the secret that a host must show. Every connection has a thread and a few seconds for that.
"""

import base64
import contextlib
import functools
import hashlib
import hmac
import json
import platform
import queue
import re
import secrets
import socket
import ssl
import subprocess
import tempfile
import threading
import time
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

from scratch_ddp.cells.hosts.tls_channel import TlsChannel
from scratch_ddp.cells.words import ClusterError

_HELLO_LIMIT = 5.0  # seconds that a connection may be silent before it shows the secret
_LONGEST_HELLO = 4096  # bytes
_PACKAGE = Path(__file__).resolve().parents[2]  # scratch_ddp/
_OPENSSL = [
    *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
    *("-days", "2", "-subj", "/CN=rank cells"),
]


@dataclass(frozen=True)
class Ticket:
    """As text "10.0.0.5:43211/<fingerprint>/<secret>". Whoever holds it can run code in the notebook's ranks."""

    address: str
    port: int
    fingerprint: str  # of the certificate: SHA-256, base64 for URLs
    secret: str = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)

    def __str__(self) -> str:
        return f"{self.address}:{self.port}/{self.fingerprint}/{self.secret}"

    @classmethod
    def parse(cls, text: str) -> "Ticket":
        """Read a ticket. Raises ValueError, which says what is wrong."""
        found = re.fullmatch(r"([^/]+):(\d{1,5})/([\w-]{43})/([\w-]{32})", text.strip())
        if found is None:
            raise ValueError("this is not a whole ticket: copy the whole command that %dist_init has printed")
        return cls(found[1], int(found[2]), found[3], found[4])


class Door:
    """Listens at `address`. `arrivals` gets (channel, hello) of each host with the ticket, until the door is closed.

    Raises OSError if the machine has no such address or no `openssl`, or the port is taken.
    """

    def __init__(self, address: str, port: int = 0):
        self._context, own_fingerprint = _make_server_context()
        family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        self._socket = socket.create_server(place[:2], family=family, backlog=128)
        self._socket.settimeout(0.2)
        self.ticket = Ticket(*self._socket.getsockname()[:2], own_fingerprint)
        self.arrivals: queue.SimpleQueue[tuple[TlsChannel, dict[str, Any]]] = queue.SimpleQueue()
        self.strangers = 0  # connections that did not show the secret
        self._closed = False
        threading.Thread(target=self._accept, name="accepts-hosts", daemon=True).start()

    def close(self) -> None:
        """Let nobody in any more. The ticket is worthless from here on."""
        self._closed = True
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
            threading.Thread(target=self._greet, args=(connection,), name="greets-a-host", daemon=True).start()

    def _greet(self, connection: socket.socket) -> None:
        """Let the connection in if its first line shows the secret in time."""
        try:
            connection.settimeout(_HELLO_LIMIT)
            connection = self._context.wrap_socket(connection, server_side=True)
            hello = json.loads(connection.makefile("rb").readline(_LONGEST_HELLO))
            if not hmac.compare_digest(hello.pop("secret").encode(), self.ticket.secret.encode()):
                raise ValueError("another secret")
        except Exception:
            self.strangers += 1
            connection.close()
        else:
            self.arrivals.put((TlsChannel(connection), hello))
            if self._closed:  # perhaps after the last look at the arrivals
                self.close()


def open_door(listen: str) -> Door:
    """Listen at "ADDRESS" or "ADDRESS:PORT". Raises ClusterError, which says what would be right."""
    address, _, port = listen.rpartition(":") if listen.count(":") == 1 else (listen, "", "0")
    addresses = {
        each.address for of_one in psutil.net_if_addrs().values() for each in of_one if each.family == socket.AF_INET
    }
    mine = f"This machine has {', '.join(sorted(addresses))}."
    if address in ("", "0.0.0.0", "::", "*"):
        raise ClusterError(f"--listen {listen}: name the one address at which the hosts reach this machine. {mine}")
    try:
        return Door(address, int(port))
    except (OSError, ValueError, OverflowError) as error:
        raise ClusterError(f"--listen {listen}: can't listen there ({error}). {mine}") from None


def refuse(channel: TlsChannel, why: str) -> None:
    """Send a host away, with the reason."""
    channel.send({"type": "refused", "why": why})
    channel.end_sending()
    channel.close()


# Certificates


def _make_server_context() -> tuple[ssl.SSLContext, str]:
    """TLS 1.3 with a fresh key, and the fingerprint of its certificate. The key is on disk for this moment only."""
    with tempfile.TemporaryDirectory(prefix="scratch-ddp-key-") as folder:  # readable by this user only
        key, certificate = Path(folder) / "key", Path(folder) / "certificate"
        command = [*_OPENSSL, "-keyout", str(key), "-out", str(certificate)]
        subprocess.run(command, check=True, capture_output=True, timeout=30)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_cert_chain(certificate, key)
        return context, fingerprint(ssl.PEM_cert_to_DER_cert(certificate.read_text()))


def make_client_context() -> ssl.SSLContext:
    """TLS 1.3 that accepts any certificate: the caller compares its `fingerprint` with the ticket's."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def fingerprint(certificate: bytes) -> str:
    """SHA-256 of a certificate in DER form, as 43 characters."""
    return base64.urlsafe_b64encode(hashlib.sha256(certificate).digest()).decode().rstrip("=")


# What must be the same on all hosts


@functools.cache
def own_versions() -> dict[str, str]:
    """This host's: Python to the minor version, torch without its build (+cpu), a digest of this package's code.

    torch is not imported for it: that takes seconds.
    """
    code = hashlib.sha256()
    for path in sorted(_PACKAGE.rglob("*.py")):
        code.update(f"{path.relative_to(_PACKAGE)}\n".encode() + path.read_bytes())
    python = ".".join(platform.python_version_tuple()[:2])
    return {"Python": python, "torch": version("torch").split("+")[0], "scratch_ddp": f"code {code.hexdigest()[:8]}"}
