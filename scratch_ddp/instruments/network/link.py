"""A link: its seconds per message and per byte, its name, the source of its figures. Presets of real links.

The presets' bandwidths are what vendors and standards state for one direction; real transfers are slower. Their
latencies are those with which NCCL itself forecasts a ring (protocol "Simple"): one per call and one per round.
"""

from dataclasses import dataclass

from scratch_ddp.instruments.cost.wire import CALL, NETWORK, NVLINK, PCIE, Wire, refuse_unless_finite


@dataclass(frozen=True)
class Link:
    """The wire at each rank. A collective or message takes `alpha` + rounds·`per_round` + bytes·`beta` seconds.

    `alpha`: seconds per call; `beta`: seconds per byte that a rank sends (or receives, if that is more); `per_round`:
    seconds per round of the algorithm, which is 2(n−1) rounds for an all-reduce on a ring of n ranks and one for a
    message; `source`: where the figures come from. Raises ValueError if a figure is negative, infinite or NaN.
    """

    alpha: float
    beta: float
    name: str = ""
    source: str = ""
    per_round: float = 0.0

    def __post_init__(self) -> None:
        refuse_unless_finite(alpha=self.alpha, beta=self.beta, per_round=self.per_round)

    def seconds(self, nbytes: float, rounds: int = 0) -> float:
        """Seconds for which one collective or message takes the wire."""
        return self.alpha + self.per_round * rounds + self.beta * nbytes

    def wire(self, world_size: int) -> Wire:
        """The same link for the forecasts of `instruments.cost`."""
        return Wire(self.alpha, self.beta, world_size, self.per_round)

    def __str__(self) -> str:
        speed = f"{1e-9 / self.beta:.3g} GB/s" if self.beta else "any number of bytes at once"
        round_ = f", {self.per_round * 1e6:g} µs per round" if self.per_round else ""
        return f"{self.name or 'link'}: {self.alpha * 1e6:g} µs per call{round_}, {speed}"


_NCCL = "latencies: NVIDIA/nccl, src/graph/tuning.cc, ring with protocol Simple, a call and a round"


def _by_bandwidth(name: str, gigabytes: float, per_round: float, source: str) -> Link:
    """A link by its bandwidth in one direction, in 10⁹ bytes per second."""
    return Link(CALL, 1e-9 / gigabytes, name, f"bandwidth: {source}; {_NCCL}", per_round)


_LINKS = [
    Link(
        190e-6,
        0.269 / 2**30,
        "T4 over PCIe",
        "fitted to published figures of two T4 under NCCL: an all-reduce of 1 GiB takes 269 ms; a training step takes "
        "1406.7 ms with an all-reduce for each of 219 parameters and 1365.2 ms with one for all (see "
        "scratch_ddp.course.pages.published_step)",
    ),
    _by_bandwidth("NVLink 3", 300, NVLINK, "NVIDIA A100 data sheet, 600 GB/s in both directions together"),
    _by_bandwidth("NVLink 4", 450, NVLINK, "NVIDIA H100 data sheet, 900 GB/s in both directions together"),
    _by_bandwidth("NVLink 5", 900, NVLINK, "NVIDIA Blackwell architecture, 1.8 TB/s in both directions together"),
    _by_bandwidth("PCIe 3.0 x16", 16 * 8 * 128 / 130 / 8, PCIE, "PCI-SIG, 16 lanes of 8 GT/s, 128b/130b"),
    _by_bandwidth("PCIe 4.0 x16", 16 * 16 * 128 / 130 / 8, PCIE, "PCI-SIG, 16 lanes of 16 GT/s, 128b/130b"),
    _by_bandwidth("PCIe 5.0 x16", 16 * 32 * 128 / 130 / 8, PCIE, "PCI-SIG, 16 lanes of 32 GT/s, 128b/130b"),
    _by_bandwidth("InfiniBand HDR", 200 / 8, NETWORK, "NVIDIA ConnectX-6 data sheet, 200 Gb/s a port"),
    _by_bandwidth("InfiniBand NDR", 400 / 8, NETWORK, "NVIDIA ConnectX-7 data sheet, 400 Gb/s a port"),
    _by_bandwidth("Ethernet 1 Gb", 1 / 8, NETWORK, "IEEE 802.3ab"),
    _by_bandwidth("Ethernet 10 Gb", 10 / 8, NETWORK, "IEEE 802.3ae"),
    _by_bandwidth("Ethernet 25 Gb", 25 / 8, NETWORK, "IEEE 802.3by"),
    _by_bandwidth("Ethernet 100 Gb", 100 / 8, NETWORK, "IEEE 802.3ba"),
]

PRESETS: dict[str, Link] = {link.name: link for link in _LINKS}


def as_link(link: Link | str | None) -> Link | None:
    """Return the link meant by a Link, a preset's name or None.

    Raises ValueError, listing the presets, for an unknown name, and TypeError for anything else.
    """
    if link is None or isinstance(link, Link):
        return link
    if isinstance(link, str):
        return preset(link)
    raise TypeError(f"a Link, the name of a preset or None is needed, not {type(link).__name__}")


def preset(name: str) -> Link:
    """Return the preset of that name. Raises ValueError, listing all presets, if there is none."""
    try:
        return PRESETS[name]
    except KeyError:
        raise ValueError(f"there is no link {name!r}; there are {', '.join(map(repr, PRESETS))}") from None
