"""Hosts, each with one network card that its ranks share: what leaves or enters a host queues at its card.

The cards are in memory that all ranks share. When the data of a transfer between hosts has arrived, the first of its
ranks to notice gives it a time: the earliest, once all are ready, at which all cards that it passes are free. The
other ranks find this time there. Groups that share a `Hosts` share its cards.
"""

import contextlib
import fcntl
import mmap
import os
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch.distributed as dist

from scratch_ddp.instruments.cost.two_levels import CardLoad, card_loads
from scratch_ddp.instruments.network.ready_times import Numbered, ReadyTimes, share_memory
from scratch_ddp.instruments.traffic.calls import Call

_KEPT = 256  # transfers that a card's timetable remembers, in each direction; far more than can be under way
_TINY = 1e-9  # seconds: less is no overlap
_BYTES = 8  # a cell is a float64
_CELLS = 3 + 2 * 2 * _KEPT  # of a host: the bytes sent, two counters, two timetables


class Hosts:
    """Which rank is on which host, and the hosts' cards. Made by `linked_group` and `linked_mesh`.

    `of_rank`: the host's number of each global rank.
    """

    def __init__(self, of_rank: Mapping[int, int], memory: mmap.mmap, lock: str):
        self.of_rank = dict(of_rank)
        self._lock_file = open(lock, "rb")  # noqa: SIM115  it is closed with this object
        self._threads = threading.Lock()
        count = len(set(of_rank.values()))
        cells = np.frombuffer(memory, dtype=np.float64, count=count * _CELLS)
        by_host = cells.reshape(count, -1)
        self._sent, self._next = by_host[:, 0], by_host[:, 1:3]
        self._taken = by_host[:, 3:].reshape(count, 2, _KEPT, 2)  # host, direction, transfer, (from, until)

    @property
    def bytes_out(self) -> list[int]:
        """Bytes that have left each host so far."""
        return [int(sent) for sent in self._sent]

    def loads(self, call: Call) -> Mapping[int, CardLoad]:
        """What a call sends through the cards, by host. Empty if it stays in one host or its peer is not known."""
        hosts = [self.of_rank[rank] for rank in call.members]
        if call.name not in ("send", "recv"):
            return card_loads(call.name, call.payload, hosts, call.peer)
        if call.peer is None or hosts[call.rank] == hosts[call.peer]:
            return {}
        source, destination = (call.rank, call.peer) if call.name == "send" else (call.peer, call.rank)
        return {hosts[source]: CardLoad(call.payload, 0), hosts[destination]: CardLoad(0, call.payload)}

    def start(self, times: ReadyTimes, transfer: Numbered, loads: Mapping[int, CardLoad], beta: float) -> float:
        """Return when a transfer begins, which is the same for all of its ranks; the first to ask takes the cards."""
        with self._one_at_a_time():
            start = times.agreed(transfer)
            if start is None:
                start = self._take(loads, beta, times.latest(transfer))
                times.agree(transfer, start)
        return start

    def clear(self) -> None:
        """Free all cards: transfers under way were abandoned."""
        with self._one_at_a_time():
            self._taken[:] = 0

    def _take(self, loads: Mapping[int, CardLoad], beta: float, ready: float) -> float:
        needs = [(host, way, beta * load[way]) for host, load in loads.items() for way in (0, 1) if load[way]]
        start = self._first_gap(needs, ready)
        for host, way, seconds in needs:
            place = int(self._next[host, way]) % _KEPT
            self._taken[host, way, place] = start, start + seconds
            self._next[host, way] += 1
        for host, load in loads.items():
            self._sent[host] += load.out
        return start

    def _first_gap(self, needs: Sequence[tuple[int, int, float]], start: float) -> float:
        """The earliest time from `start` on at which all cards are free for as long as is needed."""
        while True:
            ends = []
            for host, way, seconds in needs:
                begin, end = self._taken[host, way].T
                overlaps = (begin < start + seconds - _TINY) & (end > start + _TINY)
                ends += end[overlaps].tolist()
            if not ends:
                return start
            start = min(ends)

    @contextlib.contextmanager
    def _one_at_a_time(self) -> Iterator[None]:
        """Keep other threads and processes out. The kernel frees the lock of a process that dies."""
        with self._threads:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._lock_file, fcntl.LOCK_UN)


def layout_problem(hosts: int | Sequence[int] | Hosts, ranks: Sequence[int]) -> str | None:
    """Say why these hosts don't fit the group's (global) ranks, or return None."""
    if isinstance(hosts, Hosts):
        strangers = [rank for rank in ranks if rank not in hosts.of_rank]
        return f"ranks {strangers} of the group are on none of these hosts" if strangers else None
    if isinstance(hosts, int) and not isinstance(hosts, bool):
        if hosts < 1 or len(ranks) % hosts:
            return f"{len(ranks)} ranks can't be shared evenly by {hosts} hosts"
        return None
    if isinstance(hosts, Sequence) and not isinstance(hosts, str) and all(isinstance(each, int) for each in hosts):
        if len(hosts) != len(ranks) or set(hosts) != set(range(len(set(hosts)))):
            return f"hosts={tuple(hosts)}: a host's number, counted from 0, is needed for each of {len(ranks)} ranks"
        return None
    return f"hosts: a number, the host of each rank or another group's hosts are needed, not {hosts!r}"


def share_hosts(hosts: int | Sequence[int] | Hosts, group: dist.ProcessGroup | None) -> Hosts | None:
    """Return the hosts with cards that all ranks of `group` share, or None unless all are on one machine.

    Collective, as `share_ready_times`, unless these are another group's `Hosts`.
    """
    if isinstance(hosts, Hosts):
        return hosts
    ranks = dist.get_process_group_ranks(group)
    numbers = [rank * hosts // len(ranks) for rank in range(len(ranks))] if isinstance(hosts, int) else hosts
    memory = share_memory(_BYTES * _CELLS * len(set(numbers)), group)
    path = [tempfile.mkstemp(prefix="scratch_ddp-cards-")[1] if dist.get_rank(group) == 0 else None]
    try:
        dist.broadcast_object_list(path, group=group, group_src=0)
        return memory and Hosts(dict(zip(ranks, numbers, strict=True)), memory, path[0])
    finally:
        dist.barrier(group=group)
        if dist.get_rank(group) == 0:
            os.unlink(path[0])
