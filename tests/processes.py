"""Processes seen from outside: whether they live, and where they listen."""

import ipaddress
import socket
import time
from collections.abc import Iterable

import psutil

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def alive(pid: int) -> bool:
    """Whether the process exists and is not a zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until_gone(pids: list[int], limit: float) -> float:
    """Return the seconds until none of the processes lives. Raises AssertionError after `limit` seconds."""
    began = time.monotonic()
    while left := [pid for pid in pids if alive(pid)]:
        assert time.monotonic() - began < limit, f"still there after {limit} s: {left}"
        time.sleep(0.02)
    return time.monotonic() - began


def listening_addresses(pid: int) -> set[Address]:
    """The addresses on which a process accepts TCP connections or receives UDP."""
    return {
        _address(each.laddr.ip)
        for each in psutil.Process(pid).net_connections("inet")
        if each.laddr and (each.status == psutil.CONN_LISTEN or each.type == socket.SOCK_DGRAM)
    }


def listening_beyond_loopback(pids: Iterable[int]) -> list[str]:
    """ "process 12 listens on 0.0.0.0" for every address of the processes that other machines can reach."""
    return [
        f"process {pid} listens on {address}"
        for pid in pids
        for address in listening_addresses(pid)
        if not address.is_loopback
    ]


def _address(text: str) -> Address:
    address = ipaddress.ip_address(text)
    return getattr(address, "ipv4_mapped", None) or address
