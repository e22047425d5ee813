"""Which sockets a process listens on, read from /proc (Linux)."""

import ipaddress
import os
from collections.abc import Iterable
from pathlib import Path

_LISTENING = "0A"


def listening_beyond_loopback(pids: Iterable[int]) -> list[str]:
    """ "process 12 listens on 0.0.0.0:5000" for every listening TCP socket of the processes that others can reach."""
    found = []
    for pid in pids:
        inodes = _socket_inodes(pid)
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                address, port = fields[1].split(":")
                if fields[3] == _LISTENING and fields[9] in inodes and not _address(address).is_loopback:
                    found.append(f"process {pid} listens on {_address(address)}:{int(port, 16)}")
    return found


def _socket_inodes(pid: int) -> set[str]:
    inodes = set()
    for file in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(file)
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    return inodes


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """/proc writes an address as 32-bit words in the machine's byte order (little-endian here)."""
    words = [bytes.fromhex(text[start : start + 8])[::-1] for start in range(0, len(text), 8)]
    address = ipaddress.ip_address(b"".join(words))
    mapped = getattr(address, "ipv4_mapped", None)
    return mapped or address
