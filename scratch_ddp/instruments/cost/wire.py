"""Links, clusters, and what connects a group of ranks: the seconds of collectives, T = α·P + β·n.

Sources: P. Patarasuk, X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", J. Parallel
Distrib. Comput. 69 (2009), for the ring; R. Hockney, "The communication challenge for MPP", Parallel Computing 20
(1994), for α and β; src/graph/tuning.cc of NVIDIA/nccl for latencies, and how a collective over hosts adds them up.
"""

import math
from dataclasses import dataclass, replace


def ring_bytes(call: str, payload: int, n: int, rank: int, root: int | None = None) -> int:
    """Bytes that `rank` (of `n`, in the group) sends when the collective `call` runs on a ring.

    `payload`: bytes of this rank's input, for reduce_scatter, all_to_all and the source of a scatter of all n chunks;
    `root`: the group rank of the source or destination.
    """
    parts = {  # of the n parts of a payload, how many are sent
        "all_reduce": 2 * (n - 1),  # a reduce-scatter, then an all-gather
        "all_gather": n * (n - 1),
        "reduce_scatter": n - 1,
        "all_to_all": n - 1,
        "broadcast": n * ((rank + 1) % n != root),  # the last rank on the ring passes nothing on
        "reduce": n * (rank != root),
        "gather": n * (rank != root),
        "scatter": (n - 1) * (rank == root),
        "barrier": 0,
        "send": n,
        "recv": 0,
    }
    return round(parts[call] * payload / n) if n > 1 else 0


def ring_rounds(call: str, n: int) -> int:
    """Messages that follow one another when the collective `call` runs on a ring of `n` ranks; 1 for a message."""
    if call in ("send", "recv"):
        return 1
    return (2 if call in ("all_reduce", "barrier") else 1) * (n - 1)


@dataclass(frozen=True)
class Link:
    """The wire at each rank. A collective or message takes `alpha` + rounds·`per_round` + bytes·`beta` seconds.

    `alpha`: per call; `beta`: per byte that a rank sends (or receives, if that is more); `per_round`: of which an
    all-reduce on a ring has 2(n−1), a message one; `small`: alpha, per_round and least beta of a protocol that sends
    twice the bytes: the quicker counts.
    """

    alpha: float
    beta: float
    name: str = ""
    per_round: float = 0.0
    small: tuple[float, float, float] | None = None

    def seconds(self, nbytes: float, rounds: int = 0) -> float:
        """Seconds for which one collective or message takes the wire."""
        return collective_seconds(self, self, rounds, 0, nbytes, self.beta * nbytes)

    def wire(self, world_size: int, trees: bool = False) -> "Wire":
        """What connects `world_size` ranks, each of which has such a link to all others."""
        return Wire(self, self, world_size, 1, trees)

    def __str__(self) -> str:
        speed = f"{1e-9 / self.beta:.3g} GB/s" if self.beta else "any number of bytes at once"
        round_ = f", {self.per_round * 1e6:g} µs per round" if self.per_round else ""
        return f"{self.name or 'link'}: {self.alpha * 1e6:g} µs per call{round_}, {speed}"


def collective_seconds(inside: Link, between: Link, fast: int, slow: int, nbytes: float, busy: float) -> float:
    """Seconds of a collective whose bytes take `busy`: a chunk passes `fast` links in hosts and `slow` ones between."""
    # A ring has no barrier: what a chunk passes adds up.
    used = [(link, rounds) for link, rounds in ((inside, fast), (between, slow)) if rounds] or [(inside, 0)]
    seconds = max(link.alpha for link, _ in used) + sum(rounds * link.per_round for link, rounds in used) + busy
    if all(link.small for link, _ in used):
        alpha, _, beta = map(max, zip(*(link.small for link, _ in used), strict=True))
        latency = alpha + sum(rounds * link.small[1] for link, rounds in used)
        seconds = min(seconds, latency + max(2 * busy, beta * nbytes))
    return seconds


@dataclass(frozen=True)
class Wire:
    """What connects the ranks of a group, numbered in blocks: up to `per_host` in a host.

    `inside`: the link of two ranks of a host; `between`: a rank's share of the host's network cards. A ring leaves a
    host on the shares of all its members. `trees`: an all-reduce takes a tree where that is quicker, as in NCCL.
    """

    inside: Link
    between: Link
    world_size: int
    per_host: int = 1
    trees: bool = False

    @property
    def hosts(self) -> int:
        return -(-self.world_size // self.per_host)

    @property
    def beta(self) -> float:
        """Seconds per byte that a rank of a ring sends."""
        if self.hosts == 1:
            return self.inside.beta
        return max(self.inside.beta if self.per_host > 1 else 0.0, self.between.beta / self.per_host)

    def _seconds(self, rounds: int, nbytes: float) -> float:
        slow = -(-rounds // self.per_host) if self.hosts > 1 else 0
        return collective_seconds(self.inside, self.between, rounds - slow, slow, nbytes, self.beta * nbytes)

    @property
    def _large(self) -> "Wire":
        """By the protocol for large messages alone: NCCL's trees, and all that is called an all-reduce's α."""
        return replace(self, inside=replace(self.inside, small=None), between=replace(self.between, small=None))

    def _of_tree(self, nbytes: float) -> float:
        # 2·((ranks/host − 1)·inside + log2(hosts)·between): up to the root and down again
        up, ranks = math.floor(math.log2(self.hosts)), min(self.per_host, self.world_size)
        links = self._large.inside, self._large.between
        return collective_seconds(*links, 2 * (ranks - 1), 2 * up, nbytes, self.beta_of_all_reduce * nbytes)

    def all_reduce(self, nbytes: float) -> float:
        """Seconds for an all-reduce of `nbytes` bytes."""
        n = self.world_size
        if n == 1:
            return 0.0
        ring = self._seconds(ring_rounds("all_reduce", n), 2 * (n - 1) / n * nbytes)
        return min(ring, self._of_tree(nbytes)) if self.trees else ring

    def all_gather(self, nbytes: float) -> float:
        """Seconds for an all-gather that leaves `nbytes` bytes on each rank, or a reduce-scatter of as many."""
        n = self.world_size
        return self._seconds(ring_rounds("all_gather", n), (n - 1) / n * nbytes) if n > 1 else 0.0

    def message(self, nbytes: float) -> float:
        """Seconds for a message of `nbytes` bytes to a rank of another host, or of this one if there is no other."""
        return (self.between if self.hosts > 1 else self.inside).seconds(nbytes, 1)

    @property
    def alpha_of_all_reduce(self) -> float:
        """Seconds that an all-reduce takes regardless of its size."""
        return self._large.all_reduce(0)

    @property
    def beta_of_all_reduce(self) -> float:
        """Seconds per byte of the tensor: β·2(n−1)/n, since a ring sends almost twice what it sums."""
        return self.beta * 2 * (self.world_size - 1) / self.world_size


# Seconds with which NCCL forecasts a ring (src/graph/tuning.cc of NVIDIA/nccl): of a call, and of a round, by what it
# passes. `Simple` is its protocol for large messages; LL, for small ones, sends a flag with every four bytes, and no
# more than so many bytes a second.
_CALL, _SMALL_CALL = 8.4e-6, 6.6e-6  # Simple, LL
_NVLINK, _PCIE, _NETWORK = (3.4e-6, 0.6e-6, 141e9), (5.7e-6, 1.0e-6, 141e9), (14.0e-6, 2.7e-6, 35e9)  # Simple, LL, LL


def _link(name: str, gigabytes: float, rounds: tuple[float, float, float]) -> Link:
    """A link by its bandwidth in one direction, in 10⁹ bytes per second, with NCCL's latencies."""
    per_round, small, most = rounds
    return Link(_CALL, 1e-9 / gigabytes, name, per_round, small=(_SMALL_CALL, small, 1 / most))


# Two T4 under NCCL: an all-reduce of 1 GiB takes 269 ms; a step takes 1406.7 ms with an all-reduce for each of 219
# parameters, and 1365.2 ms with one for all (see course.pages.published_step). So this link's seconds per call have the
# software of a step in them, other links' don't.
_T4 = Link(190e-6, 0.269 / 2**30, "T4 over PCIe")
# By data sheets: NVIDIA A100, H100 and Blackwell (600, 900 and 1800 GB/s in both directions together); PCI-SIG (16
# lanes of 8, 16 and 32 GT/s, 128b/130b); NVIDIA ConnectX-6 and 7 (200 and 400 Gb/s a port); IEEE 802.3ab, ae, by, ba.
_LINKS = [
    _T4,
    *(_link(f"NVLink {number}", speed, _NVLINK) for number, speed in ((3, 300), (4, 450), (5, 900))),
    *(_link(f"PCIe {number}.0 x16", 2 * rate * 128 / 130, _PCIE) for number, rate in ((3, 8), (4, 16), (5, 32))),
    *(_link(f"InfiniBand {name}", gigabits / 8, _NETWORK) for name, gigabits in (("HDR", 200), ("NDR", 400))),
    *(_link(f"Ethernet {gigabits} Gb", gigabits / 8, _NETWORK) for gigabits in (1, 10, 25, 100)),
]
PRESETS: dict[str, Link] = {link.name: link for link in _LINKS}


def preset(link: Link | str) -> Link:
    """Return the preset of that name, or the link itself. Raises ValueError, listing all presets, if there is none."""
    if not isinstance(link, str):
        return link
    if link not in PRESETS:
        raise ValueError(f"there is no link {link!r}; there are {', '.join(map(repr, PRESETS))}")
    return PRESETS[link]


@dataclass(frozen=True)
class Accelerator:
    """`flops`: operations a second in bfloat16, at best; `memory`: bytes; `price`: of an hour, about, in dollars."""

    name: str
    flops: float
    memory: float
    price: float = 0.0


@dataclass(frozen=True)
class Cluster:
    """Nodes of `per_node` devices: `inside` connects those of a node, `between` is a device's share of its cards."""

    device: Accelerator
    per_node: int
    inside: Link
    between: Link

    def wire(self, ranks: int, apart: int = 1) -> Wire:
        """What connects a group of `ranks` devices, each `apart` from the next, on the cards of all its devices."""
        return Wire(self.inside, self.between, ranks, max(1, self.per_node // apart), trees=True)


# Operations and memory: data sheets of NVIDIA (BF16 without sparsity; of the T4 FP16) and Google Cloud. Links: NVIDIA
# DGX SuperPOD, eight devices over NVLink with a port each; AWS g4dn.12xlarge, four T4 that share 50 Gb/s. TPU v5p: J.
# Austin et al., "How to Scale Your Model", 2025: 8960 chips, 90 GB/s a link each way, so 180 on a ring, and three
# rings; Google Cloud: 50 Gb/s to other pods. Its latency, a hop of about 1 µs, is a guess.
_NVLINK_4, _NDR = PRESETS["NVLink 4"], PRESETS["InfiniBand NDR"]
_ICI, _POD_TO_POD = Link(_CALL, 1 / 180e9, "ICI", per_round=1e-6), _link("between pods", 6.25, _NETWORK)
_IN_G4, _OF_G4 = _link("PCIe of T4", 1e-9 / _T4.beta, _PCIE), _link("of a T4", 50 / 8 / 4, _NETWORK)
CLUSTERS: dict[str, Cluster] = {
    "A100 HDR": Cluster(Accelerator("A100", 312e12, 80e9, 1.5), 8, PRESETS["NVLink 3"], PRESETS["InfiniBand HDR"]),
    "H100": Cluster(Accelerator("H100", 989e12, 80e9, 2.5), 8, _NVLINK_4, _NDR),
    "H200": Cluster(Accelerator("H200", 989e12, 141e9, 3.5), 8, _NVLINK_4, _NDR),
    "TPU v5p": Cluster(Accelerator("TPU v5p", 459e12, 95 * 2**30, 4.2), 8960, _ICI, _POD_TO_POD),
    "T4": Cluster(Accelerator("T4", 65e12, 16e9, 0.35), 4, _IN_G4, _OF_G4),
}
