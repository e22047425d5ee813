"""Two network namespaces of Linux as two hosts, with a cable between them that can be pulled. They need root."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator

NAMES = (f"scratch-ddp-{os.getpid()}-a", f"scratch-ddp-{os.getpid()}-b")  # two runs do not meet
ADDRESSES = ("10.77.0.1", "10.77.0.2")


def missing() -> str:
    """Why there can be no namespaces here; empty if there can."""
    try:
        _ip("netns", "add", NAMES[0])
        _ip("netns", "del", NAMES[0])
    except (OSError, subprocess.CalledProcessError) as error:
        return f"no network namespaces here, which need root and the command ip (iproute2): {error}"
    return ""


def within(namespace: str) -> list[str]:
    """A command that runs another one in a namespace."""
    return ["ip", "netns", "exec", namespace]


@contextlib.contextmanager
def connected() -> Iterator[None]:
    """Two hosts, 10.77.0.1 and 10.77.0.2, with a cable between them, and connected to nothing else."""
    first, second = NAMES
    with contextlib.ExitStack() as stack:
        for name in NAMES:
            _ip("netns", "add", name)
            stack.callback(_remove, name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", first, "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", second)
        for name, address in zip(NAMES, ADDRESSES, strict=True):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "cable")
            _ip("-n", name, "link", "set", "cable", "up")
        yield


def plug(state: str) -> None:
    """ "down" pulls the cable of the second host, "up" plugs it in again."""
    _ip("-n", NAMES[1], "link", "set", "cable", state)


def wait_until_empty(namespace: str, limit: float) -> float:
    """The seconds until no process is left in a namespace. Raises AssertionError after `limit` seconds."""
    began = time.monotonic()
    while left := _ip("netns", "pids", namespace).split():
        assert time.monotonic() - began < limit, f"still there after {limit} s: {left}"
        time.sleep(0.02)
    return time.monotonic() - began


def _remove(name: str) -> None:
    for pid in _ip("netns", "pids", name).split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    _ip("netns", "del", name)


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout
