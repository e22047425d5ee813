"""Two network namespaces of Linux as two hosts, with a cable between them that can be pulled. They need root."""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

NAMES = (f"scratch-ddp-{os.getpid()}-a", f"scratch-ddp-{os.getpid()}-b")  # two runs do not meet
ADDRESSES = ("10.77.0.1", "10.77.0.2")


def missing() -> str:
    """Why there can be no namespaces here; empty if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if not shutil.which("ip"):
        return "network namespaces need the command ip (iproute2)"
    name = f"{NAMES[0]}-probe"
    probe = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if probe.returncode:
        return f"no network namespaces here: {probe.stderr.strip()}"
    _ip("netns", "del", name)
    return ""


def within(namespace: str) -> list[str]:
    """A command that runs another one in a namespace."""
    return ["ip", "netns", "exec", namespace]


@contextlib.contextmanager
def connected() -> Iterator[None]:
    """Two hosts, 10.77.0.1 and 10.77.0.2, with a cable between them, and connected to nothing else."""
    _remove_namespaces()
    try:
        for name in NAMES:
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        first, second = NAMES
        _ip("-n", first, "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", second)
        for name, address in zip(NAMES, ADDRESSES, strict=True):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "cable")
            _ip("-n", name, "link", "set", "cable", "up")
        yield
    finally:
        _remove_namespaces()


def plug(state: str) -> None:
    """ "down" pulls the cable of the second host, "up" plugs it in again."""
    _ip("-n", NAMES[1], "link", "set", "cable", state)


def processes_in(namespace: str) -> list[int]:
    found = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=True)
    return [int(pid) for pid in found.stdout.split()]


def _remove_namespaces() -> None:
    for name in NAMES:
        if Path("/run/netns", name).exists():
            for pid in processes_in(name):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            _ip("netns", "del", name)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def wait_until_empty(namespace: str, limit: float) -> float:
    """The seconds until no process is left in a namespace. Raises AssertionError after `limit` seconds."""
    began = time.monotonic()
    while left := processes_in(namespace):
        assert time.monotonic() - began < limit, f"still there after {limit} s: {left}"
        time.sleep(0.02)
    return time.monotonic() - began
