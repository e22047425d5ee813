"""A network of two levels: fast links inside each host, and one network card per host, which its ranks share.

A ring over all ranks passes the hosts' cards on some of its edges. How often depends on the order of the ranks: in
blocks, each host is left once, as `Wire` has it; where hosts alternate, each edge leaves one.
"""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

from scratch_ddp.instruments.cost.wire import Link, collective_seconds, ring_bytes, ring_rounds

_DIRECT = ("all_to_all", "gather", "scatter")  # each pair of ranks has a message of its own


class CardLoad(NamedTuple):
    """Bytes that pass a host's card in each direction."""

    out: int
    into: int


def card_loads(
    call: str, payload: int, hosts: Sequence[Hashable], root: int | None = None
) -> Mapping[Hashable, CardLoad]:
    """Bytes that a collective sends through each host's card, for the hosts that it leaves or enters.

    `hosts`: the host of each rank, in the order of the ring; `payload` and `root` as for `ring_bytes`. Collectives run
    on a ring, but for all_to_all, gather and scatter, in which each piece goes straight to its rank.
    """
    n = len(hosts)
    out, into = Counter(), Counter()
    for source, destination, nbytes in _messages(call, payload, n, root):
        if hosts[source] != hosts[destination]:
            out[hosts[source]] += nbytes
            into[hosts[destination]] += nbytes
    passed = out.keys() | into.keys()  # in a barrier with 0 bytes
    return {host: CardLoad(round(out[host]), round(into[host])) for host in sorted(passed, key=hosts.index)}


def _messages(call: str, payload: int, n: int, root: int | None) -> list[tuple[int, int, float]]:
    """(source, destination, bytes) of all that is sent in a collective."""
    if call not in _DIRECT:
        bytes_of = (ring_bytes(call, payload, n, rank, root) for rank in range(n))
        return [(rank, (rank + 1) % n, nbytes) for rank, nbytes in enumerate(bytes_of)]
    if call == "all_to_all":
        return [(a, b, payload / n) for a in range(n) for b in range(n) if a != b]
    others = [rank for rank in range(n) if rank != root]
    return [(a, root, payload) if call == "gather" else (root, a, payload / n) for a in others]


def rounds_between(call: str, hosts: Sequence[Hashable]) -> int:
    """How many of a collective's rounds pass from host to host on the way of the chunk that passes most of them."""
    n, rounds = len(hosts), ring_rounds(call, len(hosts))
    leaves = [hosts[rank] != hosts[(rank + 1) % n] for rank in range(n)]
    if call in _DIRECT:
        return rounds * any(leaves)
    whole, rest = divmod(rounds, n)
    return whole * sum(leaves) + max(sum((leaves + leaves)[at : at + rest]) for at in range(n))


def seconds_over_hosts(
    inside: Link, between: Link, call: str, own: float, hosts: Sequence[Hashable], loads: Mapping[Hashable, CardLoad]
) -> float:
    """Seconds of a collective in which a rank sends `own` bytes and the hosts' cards carry `loads`.

    All edges of a ring are busy at once, so the slower level decides for the bytes.
    """
    slow = rounds_between(call, hosts)
    cards = between.beta * max((max(load) for load in loads.values()), default=0)
    fast = ring_rounds(call, len(hosts)) - slow
    return collective_seconds(inside, between, fast, slow, own, max(inside.beta * own, cards))
