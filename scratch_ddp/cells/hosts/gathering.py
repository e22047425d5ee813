"""`%dist_init --hosts`: the command for each host, who has come, and the cluster's ranks dealt out to the hosts."""

import queue
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from scratch_ddp.cells.hosts.certificate import CertificateError
from scratch_ddp.cells.hosts.door import Door, own_addresses, refuse
from scratch_ddp.cells.hosts.host import Host
from scratch_ddp.cells.hosts.versions import describe_difference, own_versions
from scratch_ddp.cells.kernel.placement import INTERRUPTIBLE, Placement, place
from scratch_ddp.cells.kernel.reader import Event
from scratch_ddp.cells.kernel.reports import ClusterError, RankInterrupt
from scratch_ddp.cells.rank_lists import name_ranks

Say = Callable[[str], None]


def open_door(listen: str) -> Door:
    """Listen at "ADDRESS" or "ADDRESS:PORT". Raises ClusterError, which says what would be right."""
    address, _, port = listen.rpartition(":") if listen.count(":") == 1 else (listen, "", "0")
    mine = f"This machine has {', '.join(own_addresses())}."
    if not port.isdecimal() or int(port) > 65535:
        raise ClusterError(f"--listen {listen}: {port!r} is no port. Write an address, or an address and a port.")
    if address in ("", "0.0.0.0", "::", "*"):
        raise ClusterError(f"--listen {listen}: name the one address at which the hosts reach this machine. {mine}")
    try:
        return Door(address, int(port))
    except CertificateError as error:
        raise ClusterError(f"{error}.") from None
    except OSError as error:
        raise ClusterError(f"--listen {listen}: can't listen there ({error.strerror or error}). {mine}") from None


def gather(door: Door, count: int, limit: float, events: "queue.SimpleQueue[Event]", say: Say) -> list[Host]:
    """Wait until `count` hosts have joined and can start ranks. Closes the door. Raises ClusterError.

    The hosts are in the order of their node numbers (torchrun, srun), else of their names.
    """
    hosts: list[Host] = []
    told: set[Host] = set()
    until = time.monotonic() + limit
    try:
        while sum(host.ready for host in hosts) < count:
            if time.monotonic() > until:
                raise ClusterError(_who_has_come(hosts, count, limit, door))
            hosts += _arrived(door, count - len(hosts), events, say)
            for host in [host for host in hosts if host.lost]:
                hosts.remove(host)
                say(f"Host {host.name} ({host.address}) has left again. {host.failure}".rstrip())
            for host in [host for host in hosts if host.ready and host not in told]:
                told.add(host)
                say(_welcome(host, sum(each.ready and each in told for each in hosts), count))
    except BaseException as error:
        for host in hosts:
            host.let_go()
        if isinstance(error, KeyboardInterrupt):
            raise RankInterrupt(f"stopped: {sum(host.ready for host in hosts)} of {count} hosts had joined.") from None
        raise
    finally:
        door.close()
    if door.strangers:
        say(f"Turned away: {door.strangers} connections without the ticket.")
    return _in_order(hosts)


def place_ranks(hosts: list[Host], per_host: int, options: Any) -> Placement:
    """Choose GPUs on each host from those that it has. Raises ClusterError."""
    placements = []
    for host in hosts:
        try:
            placements.append(place(per_host, host.gpu_count, options.gpu_ids, options.device, options.backend))
        except ClusterError as error:
            raise ClusterError(f"host {host.name}: {error}") from None
    # One backend serves all: NCCL only if every rank of every host has a GPU to itself.
    backends = {placement.backend for placement in placements}
    backend = backends.pop() if len(backends) == 1 else INTERRUPTIBLE
    parts = []
    for number, (host, placement) in enumerate(zip(hosts, placements, strict=True)):
        ranks = name_ranks(range(number * per_host, (number + 1) * per_host))
        where = "CPU" if placement.gpus[0] is None else "GPU " + ", ".join(map(str, dict.fromkeys(placement.gpus)))
        parts.append(f"{ranks} on {host.name}, {where}")
    why = f"over {'nccl' if backend == 'nccl' else 'gloo'}: {'; '.join(parts)}"
    return Placement(backend, [gpu for placement in placements for gpu in placement.gpus], why)


def describe_networks(hosts: list[Host]) -> str:
    """For ranks that did not find each other: over what each host tries."""
    listed = ", ".join(f"{host.name}: {host.address}" for host in hosts)
    return (
        f"All hosts reach this notebook; their ranks must reach each other too ({listed}). Does a firewall between "
        "them let any port through, and does GLOO_SOCKET_IFNAME, where it is set, name the right interface?"
    )


def _arrived(door: Door, wanted: int, events: "queue.SimpleQueue[Event]", say: Say) -> list[Host]:
    """The next host that may join, if one comes within a moment."""
    try:
        channel, hello = door.arrivals.get(timeout=0.1)
    except queue.Empty:
        return []
    name = str(hello.get("name"))
    if difference := describe_difference(hello.get("versions", {}), own_versions()):
        why = f"{difference}. Install the same versions on both"
        refuse(channel, why)
        say(f"Host {name} ({hello.get('address')}) can't join: {why}.")
        return []
    if wanted < 1:
        refuse(channel, "as many hosts as the notebook waits for have come before this one")
        return []
    channel.send({"type": "welcome"})
    return [Host(channel, hello, events)]


def _welcome(host: Host, ready: int, count: int) -> str:
    gpus = {0: "no GPU", 1: "1 GPU"}.get(host.gpu_count, f"{host.gpu_count} GPUs")
    return f"Host {host.name} ({host.address}, {gpus}) has joined: {ready} of {count}."


def _who_has_come(hosts: list[Host], count: int, limit: float, door: Door) -> str:
    came = ", ".join(f"{host.name} ({host.address})" for host in hosts if host.ready)
    slow = ", ".join(host.name for host in hosts if not host.ready)
    text = f"{sum(host.ready for host in hosts)} of {count} hosts have joined within {limit:g} s"
    text += f": {came}." if came else "."
    if slow:
        text += f" {slow} came, but its launcher was not ready yet."
    if door.strangers:
        text += f" {door.strangers} connections did not show the ticket."
    address = f"{door.ticket.address}:{door.ticket.port}"
    return f"{text} The others must reach {address}. %dist_init prints a new ticket; --wait gives them more seconds."


def _in_order(hosts: list[Host]) -> list[Host]:
    """In the order of their ranks, each with a name of its own."""
    ordered = sorted(hosts, key=lambda host: (host.node is None, host.node or 0, host.name, host.address))
    names = Counter(host.name for host in ordered)
    places = Counter((host.name, host.address) for host in ordered)
    count: Counter[str] = Counter()
    for host in ordered:
        if names[host.name] > 1:
            own = host.name
            count[own] += 1
            shared = places[own, host.address] > 1
            host.name = f"{own} ({f'agent {count[own]}' if shared else host.address})"
    return ordered
