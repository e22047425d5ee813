"""gloo's connections to the other ranks, so that a group of gloo can be ended although a thread waits in it.

gloo can't abort an operation. But a wait ends at once, in an error, when the connection it waits for is closed. Then
nobody holds the group any more, and gloo gives its threads and descriptors back.
"""

import contextlib
import os
import socket
import stat
import sys
from collections.abc import Callable, Iterator
from typing import Any

_TIMEVAL = 16  # bytes of C's struct timeval


class Connections:
    """The TCP sockets that gloo has opened in this process while `make` ran. `made` is what it returned."""

    def __init__(self, make: Callable[[], Any]):
        self.ended = False
        before = _sockets()
        self.made = make()
        self._sockets = _sockets() - before

    def end(self) -> None:
        """End all that are still open. A descriptor that is another file by now is left alone."""
        self.ended = True
        for descriptor, number in self._sockets:
            with contextlib.suppress(OSError):
                if os.fstat(descriptor).st_ino == number:
                    with _borrowed(descriptor) as connection:
                        connection.shutdown(socket.SHUT_RDWR)


def _sockets() -> set[tuple[int, int]]:
    """(descriptor, inode) of each connected TCP socket of this process that may be gloo's."""
    found = set()
    for name in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile, or a socket that is not connected
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                with _borrowed(int(name)) as one:
                    if one.family in (socket.AF_INET, socket.AF_INET6) and one.getpeername() and _may_be_gloos(one):
                        found.add((int(name), status.st_ino))
    return found


def _may_be_gloos(one: socket.socket) -> bool:
    """gloo sets a time limit for reading on its sockets, as hardly anybody else does; on macOS not even gloo."""
    return sys.platform == "darwin" or any(one.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEVAL))


@contextlib.contextmanager
def _borrowed(descriptor: int) -> Iterator[socket.socket]:
    """A descriptor of gloo's as a socket. No copy: gloo would get events of what it has closed."""
    borrowed = socket.socket(fileno=descriptor)
    try:
        yield borrowed
    finally:
        borrowed.detach()
