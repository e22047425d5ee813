"""A network of two levels: fast links inside each host, and one network card per host, which its ranks share.

A ring over all ranks passes the hosts' cards on some of its edges. How often depends on the order of the ranks: in
blocks, each host is left once; where hosts alternate, each edge leaves one. A hierarchical all-reduce sends between
hosts only what each host has summed up already.
"""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from scratch_ddp.instruments.cost.wire import Wire, ring_bytes, ring_rounds

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


class Passage(NamedTuple):
    """The forecast of an exchange: how long it takes, and the bytes that leave each host."""

    seconds: float
    out_of_host: float


@dataclass(frozen=True)
class TwoLevels:
    """Hosts of equal size: `inside` is what connects the ranks of a host, `between` the cards of the hosts.

    `TwoLevels(preset("NVLink 4").wire(8), preset("Ethernet 100 Gb").wire(2))` are two hosts of eight ranks. Ranks are
    numbered in blocks: 0 to 7 are on the first host. Forecasts are for collectives one after the other, on a ring.
    """

    inside: Wire
    between: Wire

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self.inside.world_size * self.between.world_size

    def flat(self, call: str, payload: int, alternating: bool = False) -> Passage:
        """A collective over all ranks; if `alternating`, on a ring on which no two neighbours share a host."""
        size, hosts = self.inside.world_size, self.between.world_size
        order = [rank % hosts if alternating else rank // size for rank in range(self.world_size)]
        return self._pass(call, payload, order)

    def within_hosts(self, call: str, payload: int) -> Passage:
        """A collective in each host among its own ranks."""
        return self._pass(call, payload, [0] * self.inside.world_size)

    def between_hosts(self, call: str, payload: int) -> Passage:
        """A collective among the first ranks of all hosts, at the same time one among the second, and so on."""
        return self._pass(call, payload, list(range(self.between.world_size)), self.inside.world_size)

    def hierarchical_all_reduce(self, nbytes: int) -> Passage:
        """A reduce-scatter in each host, an all-reduce of each part between hosts, an all-gather in each host."""
        part = nbytes // self.inside.world_size
        return _one_after_the_other(
            self.within_hosts("reduce_scatter", nbytes),
            self.between_hosts("all_reduce", part),
            self.within_hosts("all_gather", part),
        )

    def fsdp(self, nbytes: int) -> Passage:
        """What a step of FSDP over all ranks sends for parameters of `nbytes`: two all-gathers, one reduce-scatter."""
        gather = self.flat("all_gather", nbytes // self.world_size)
        return _one_after_the_other(gather, gather, self.flat("reduce_scatter", nbytes))

    def hsdp(self, nbytes: int) -> Passage:
        """The same for HSDP: sharded in each host, and the gradients' shards averaged between hosts."""
        part = nbytes // self.inside.world_size
        gather = self.within_hosts("all_gather", part)
        scatter = self.within_hosts("reduce_scatter", nbytes)
        return _one_after_the_other(gather, gather, scatter, self.between_hosts("all_reduce", part))

    def _pass(self, call: str, payload: int, hosts: Sequence[int], at_once: int = 1) -> Passage:
        """`at_once` such collectives, each with ranks on these hosts."""
        n = len(hosts)
        each = card_loads(call, payload, hosts)
        loads = {host: CardLoad(at_once * load.out, at_once * load.into) for host, load in each.items()}
        own = max(ring_bytes(call, payload, n, rank, 0) for rank in range(n))
        seconds = collective_seconds(self.inside, self.between, own, ring_rounds(call, n), loads)
        return Passage(seconds if n > 1 else 0.0, max((load.out for load in loads.values()), default=0))


class Level(Protocol):
    """A `Wire` or a `Link`."""

    alpha: float
    beta: float
    per_round: float


def collective_seconds(
    inside: Level, between: Level, own: float, rounds: int, loads: Mapping[Hashable, CardLoad]
) -> float:
    """Seconds of a collective in which a rank sends `own` bytes and the hosts' cards carry `loads`.

    All edges of a ring are busy at once, so the slower level decides, in each round and for all bytes.
    """
    if not loads:
        return inside.alpha + inside.per_round * rounds + inside.beta * own
    slowest = max(inside.beta * own, between.beta * max(map(max, loads.values())))
    return max(inside.alpha, between.alpha) + max(inside.per_round, between.per_round) * rounds + slowest


def _one_after_the_other(*passages: Passage) -> Passage:
    return Passage(sum(each.seconds for each in passages), sum(each.out_of_host for each in passages))
