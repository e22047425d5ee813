"""Hosts whose ranks share one network card: what passes the cards, and how long it takes.

How often a ring passes them depends on the order of the ranks: in blocks, each host is left once, as `cost.Wire` has
it; where hosts alternate, each edge leaves one.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch.distributed as dist

from scratch_ddp.instruments.cost.wire import Link, collective_seconds, ring_bytes, ring_rounds
from scratch_ddp.instruments.network.nic import share_memory
from scratch_ddp.instruments.traffic.calls import Call

_DIRECT = ("all_to_all", "gather", "scatter", "send", "recv")  # not on a ring: from the source to the destination


class Hosts:
    """The host's number of each global rank, and bytes that have left hosts, by the rank that sent them."""

    def __init__(self, of_rank: dict[int, int], sent: memoryview):
        self.of_rank, self._sent = of_rank, sent

    @property
    def bytes_out(self) -> list[int]:
        """Bytes that have left each host so far."""
        out = Counter(dict.fromkeys(self.of_rank.values(), 0))
        for rank, host in self.of_rank.items():
            out[host] += int(self._sent[rank])
        return [out[host] for host in sorted(out)]

    def count(self, call: Call) -> None:
        """Count what this rank sends to other hosts in a call."""
        me, hosts = call.rank, self._of(call)
        sent = [size for source, to, size in _messages(call) if source == me and hosts[to] != hosts[me]]
        self._sent[call.members[me]] += round(sum(sent))

    def seconds(self, call: Call, own: int, between: Link, inside: Link) -> float:
        """Seconds of a call in which this rank sends `own` bytes. All edges are busy at once, so the slower counts."""
        hosts = self._of(call)
        if call.name == "scatter" and call.rank != call.peer:  # the source alone knows what it sends to all
            call = replace(call, payload=own * len(hosts))
        rounds, slow = ring_rounds(call.name, len(hosts)), rounds_between(call, hosts)
        cards = max((load for way in card_loads(call, hosts) for load in way.values()), default=0)
        busy = max(inside.beta * own, between.beta * cards)
        return collective_seconds(inside, between, rounds - slow, slow, own, busy)

    def _of(self, call: Call) -> list[int]:
        return [self.of_rank[rank] for rank in call.members]


def rounds_between(call: Call, hosts: Sequence[int]) -> int:
    """Rounds from host to host of the chunk that has most of them. `hosts`: of each rank, in the order of the ring."""
    n = len(hosts)
    rounds = ring_rounds(call.name, n)
    if call.name in _DIRECT:
        out, _ = card_loads(call, hosts)
        return rounds * bool(out)
    leaves = [hosts[rank] != hosts[(rank + 1) % n] for rank in range(n)]
    whole, rest = divmod(rounds, n)
    return whole * sum(leaves) + max(sum((leaves + leaves)[at : at + rest]) for at in range(n))


def card_loads(call: Call, hosts: Sequence[int]) -> tuple[Counter[int], Counter[int]]:
    """Bytes that a call sends out of each host's card, and into it, for the hosts that it leaves or enters."""
    out, into = Counter(), Counter()
    for source, destination, nbytes in _messages(call):
        if hosts[source] != hosts[destination]:
            out[hosts[source]] += nbytes
            into[hosts[destination]] += nbytes
    return out, into


def _messages(call: Call) -> list[tuple[int, int, float]]:
    """(source, destination, bytes) of all that is sent in a call; nothing if a receive does not know its source yet."""
    name, payload, n, me, peer = call.name, call.payload, len(call.members), call.rank, call.peer
    if name in ("send", "recv"):
        return [] if peer is None else [(me, peer, payload) if name == "send" else (peer, me, payload)]
    if name == "all_to_all":
        return [(a, b, payload / n) for a in range(n) for b in range(n) if a != b]
    if name in _DIRECT:
        others = [rank for rank in range(n) if rank != peer]
        return [(a, peer, payload) if name == "gather" else (peer, a, payload / n) for a in others]
    return [(rank, (rank + 1) % n, ring_bytes(name, payload, n, rank, peer)) for rank in range(n)]


def share_hosts(hosts: Sequence[int], group: dist.ProcessGroup | None) -> Hosts:
    """The hosts of the group's ranks, as listed. Collective. Raises as `linked_group`."""
    ranks = dist.get_process_group_ranks(group)
    if len(hosts) != len(ranks):
        raise ValueError(f"{len(ranks)} ranks need the number of a host each, not {len(hosts)} of them")
    return Hosts(dict(zip(ranks, hosts, strict=True)), share_memory(dist.get_world_size(), group))
