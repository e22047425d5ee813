"""What the ranks of one machine share in memory: when each was ready for each transfer, and what left each host.

A collective begins when its last rank is ready, which no rank can tell from the data that it receives. The ranks of one
machine share a clock, and through this module a file in memory. Each rank writes the time at which its own wire is free
for its k-th transfer before it calls the process group. Once that call has ended, it reads the times of the others,
which they wrote before their calls.
"""

import mmap
import os
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch.distributed as dist

from scratch_ddp.instruments.cost.two_levels import CardLoad, card_loads
from scratch_ddp.instruments.traffic.calls import Call

_COLLECTIVES, _MESSAGES = 2**16, 2**11  # times kept per rank, and per pair; far more than can be under way

Places = list[int]  # of the times that a transfer depends on


class ReadyTimes:
    """The times of one group. Each rank has a row for collectives, and each pair of ranks a row for either end."""

    def __init__(self, rank: int, size: int, times: memoryview):
        self._rank, self._size, self._times = rank, size, times
        self._counts: Counter = Counter()

    def reset(self) -> None:
        """Count transfers from 0 again. Every rank does so at the same point."""
        self._counts.clear()

    def write(self, call: Call, time: float) -> Places:
        """Write when this rank is ready for its next transfer."""
        row = _row(call)
        number = self._counts[row]
        self._counts[row] += 1
        self._times[self._place(row, number, self._rank)] = time
        return [self._place(row, number, rank) for rank in _awaited(call)]

    def undo(self, call: Call) -> None:
        """Undo `write` for a call that failed to start."""
        self._counts[_row(call)] -= 1

    def latest(self, places: Places) -> float:
        """Return the latest of the times that the transfer depends on, as far as they are written."""
        return max(self._times[place] for place in places)

    def _place(self, row: tuple[int, int] | None, number: int, rank: int) -> int:
        if row is None:
            return rank * _COLLECTIVES + number % _COLLECTIVES
        source, destination = row
        end = 2 * (source * self._size + destination) + (rank == destination)
        return self._size * _COLLECTIVES + end * _MESSAGES + number % _MESSAGES


def _row(call: Call) -> tuple[int, int] | None:
    """Messages are numbered per (source, destination), all collectives together (None)."""
    return {"send": (call.rank, call.peer), "recv": (call.peer, call.rank)}.get(call.name)


def _awaited(call: Call) -> Iterable[int]:
    """The ranks that must be ready before the transfer can begin on this rank."""
    if call.name in ("send", "recv", "broadcast", "scatter"):
        return {call.rank, call.peer}
    if call.name in ("reduce", "gather") and call.rank != call.peer:
        return {call.rank}
    return range(len(call.members))


class Hosts:
    """Which rank is on which host, and what has left each. Made by `linked_group` and `linked_mesh`.

    A host has one network card. `at_once`: how many like groups use it at the same time, each for its own collective;
    they share its bandwidth evenly. Other groups and messages are taken to have it for themselves.
    """

    def __init__(self, of_rank: Mapping[int, int], sent: memoryview):
        self.of_rank = dict(of_rank)  # the host's number of each global rank
        self._sent = sent  # bytes, by the rank that counts them

    @property
    def bytes_out(self) -> list[int]:
        """Bytes that have left each host so far."""
        out = Counter(dict.fromkeys(self.of_rank.values(), 0))
        for rank, host in self.of_rank.items():
            out[host] += int(self._sent[rank])
        return [out[host] for host in sorted(out)]

    def loads(self, call: Call) -> Mapping[int, CardLoad]:
        """What a call sends through the cards, by host. Empty if it stays in one host or its peer is not known."""
        hosts = [self.of_rank[rank] for rank in call.members]
        if call.name not in ("send", "recv"):
            return card_loads(call.name, call.payload, hosts, call.peer)
        if call.peer is None or hosts[call.rank] == hosts[call.peer]:
            return {}
        source, destination = (call.rank, call.peer) if call.name == "send" else (call.peer, call.rank)
        return {hosts[source]: CardLoad(call.payload, 0), hosts[destination]: CardLoad(0, call.payload)}

    def count(self, call: Call) -> None:
        """Count what leaves this rank's host: the sender of a message does, and of a collective the host's first."""
        me = call.members[call.rank]
        here = [rank for rank in call.members if self.of_rank[rank] == self.of_rank[me]]
        if call.name == "send" or (call.name != "recv" and here[0] == me):
            load = self.loads(call).get(self.of_rank[me])
            self._sent[me] += load.out if load else 0


def share_ready_times(group: dist.ProcessGroup) -> ReadyTimes | None:
    """Return ready times shared by all ranks of `group`, or None on every rank unless all are on one machine."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    times = _share_memory((size + 2) * _COLLECTIVES + 2 * size * size * _MESSAGES, group)
    return times and ReadyTimes(rank, size, times)


def share_hosts(hosts: int | Sequence[int], group: dist.ProcessGroup | None) -> Hosts:
    """Return the hosts of the group's ranks: in equal blocks, or as listed. Collective.

    Raises ValueError if they don't fit the ranks, or if not all ranks are on this machine.
    """
    ranks = dist.get_process_group_ranks(group)
    if isinstance(hosts, int) and (hosts < 1 or len(ranks) % hosts):
        raise ValueError(f"{len(ranks)} ranks can't be shared evenly by {hosts} hosts")
    numbers = [place * hosts // len(ranks) for place in range(len(ranks))] if isinstance(hosts, int) else hosts
    if len(numbers) != len(ranks):
        raise ValueError(f"hosts={tuple(numbers)}: the number of a host is needed for each of {len(ranks)} ranks")
    sent = _share_memory(dist.get_world_size(), group)
    if sent is None:
        raise ValueError("ranks that share network cards must all be on this machine")
    return Hosts(dict(zip(ranks, numbers, strict=True)), sent)


def _share_memory(count: int, group: dist.ProcessGroup | None) -> memoryview | None:
    """Return `count` float64 zeros that all ranks of `group` share, or None on each unless all are on one machine.

    Collective: a broadcast and an all-gather of small objects. The file has no name any more when this returns.
    """
    path: list[str | None] = [None]
    if dist.get_rank(group) == 0:
        handle, path[0] = tempfile.mkstemp(prefix="scratch_ddp-link-")
        with open(handle, "r+b") as file:  # sparse: zeros and, behind them, a mark that no other file has
            file.seek(8 * count)
            file.write(os.urandom(8))
    try:
        dist.broadcast_object_list(path, group=group, group_src=0)
        try:
            with open(path[0], "r+b") as file:
                memory = memoryview(mmap.mmap(file.fileno(), 0)).cast("d")
        except OSError:
            memory = None
        marks: list[float | None] = [None] * dist.get_world_size(group)
        dist.all_gather_object(marks, memory and bytes(memory[count:]), group=group)
    finally:
        if dist.get_rank(group) == 0:
            os.unlink(path[0])
    return None if None in marks or len(set(marks)) > 1 else memory
