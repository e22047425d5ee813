"""Which sockets a process listens on, read from /proc (Linux)."""

import ipaddress
import os
from collections.abc import Iterable
from pathlib import Path

_LISTENING = "0A"
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def listening_addresses(pid: int) -> set[Address]:
    """The addresses on which a process accepts TCP connections or receives UDP."""
    sockets, addresses = _socket_inodes(pid), set()
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[9] in sockets and (fields[3] == _LISTENING or table.startswith("udp")):
                addresses.add(_address(fields[1].split(":")[0]))
    return addresses


def listening_beyond_loopback(pids: Iterable[int]) -> list[str]:
    """ "process 12 listens on 0.0.0.0" for every address of the processes that other machines can reach."""
    return [
        f"process {pid} listens on {address}"
        for pid in pids
        for address in listening_addresses(pid)
        if not address.is_loopback
    ]


def _socket_inodes(pid: int) -> set[str]:
    inodes = set()
    for file in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(file)
        except OSError:  # closed meanwhile
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    return inodes


def _address(text: str) -> Address:
    """/proc writes an address as 32-bit words in the machine's byte order (little-endian here)."""
    words = [bytes.fromhex(text[start : start + 8])[::-1] for start in range(0, len(text), 8)]
    address = ipaddress.ip_address(b"".join(words))
    return getattr(address, "ipv4_mapped", None) or address
