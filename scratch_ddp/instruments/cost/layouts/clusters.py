"""Accelerators and clusters as data: what a device computes and holds, and what connects it to others."""

from dataclasses import dataclass, replace

from scratch_ddp.instruments.cost.wire import CALL, NETWORK, NVLINK, PCIE, Wire

_GB = 1e9
_GIB = 2**30


@dataclass(frozen=True)
class Accelerator:
    """`flops`: operations a second with bfloat16 matrices, at best; `memory`: bytes; `price`: of an hour, in dollars.

    A price is a round figure for hired devices, to be replaced by your own.
    """

    name: str
    flops: float
    memory: float
    price: float
    source: str


@dataclass(frozen=True)
class Cluster:
    """Nodes of `per_node` devices. `inside` connects those of a node; through `between` each reaches other nodes.

    Bandwidths are those of one device in one direction, as its maker states them.
    """

    name: str
    device: Accelerator
    per_node: int
    inside: Wire
    between: Wire
    source: str

    def wire(self, ranks: int, apart: int = 1) -> Wire:
        """What connects a group of `ranks` devices, each `apart` from the next: a node's, if they are all in one."""
        found = self.inside if ranks * apart <= self.per_node else self.between
        return replace(found, world_size=ranks)


def _wire(gigabytes: float, per_round: float) -> Wire:
    return Wire(CALL, 1 / (gigabytes * _GB), 1, per_round)


A100 = Accelerator("A100", 312e12, 80 * _GB, 1.5, "NVIDIA A100 data sheet: 312 TFLOP/s in BF16 without sparsity, 80 GB")
H100 = Accelerator(
    "H100", 989e12, 80 * _GB, 2.5, "NVIDIA H100 SXM data sheet: 1,979 TFLOP/s with sparsity, half without"
)
H200 = Accelerator("H200", 989e12, 141 * _GB, 3.5, "NVIDIA H200 SXM data sheet: as the H100, with 141 GB")
V5P = Accelerator("TPU v5p", 459e12, 95 * _GIB, 4.2, "Google Cloud, TPU v5p: 459 TFLOP/s in BF16, 95 GiB")
T4 = Accelerator("T4", 65e12, 16 * _GB, 0.35, "NVIDIA T4 data sheet: 65 TFLOP/s in FP16, 16 GB")

_SUPERPOD = "NVIDIA DGX SuperPOD: eight devices over NVLink, a port of {} Gb/s for each; latencies as in `wire`"
_POD = """J. Austin et al., "How to Scale Your Model", 2025: 8960 chips, 90 GB/s a link each way, so 180 on a ring, and
three rings; Google Cloud: 50 Gb/s to other pods; a hop of about 1 µs is a guess"""
_CLUSTERS = [
    Cluster("A100 HDR", A100, 8, _wire(300, NVLINK), _wire(25, NETWORK), _SUPERPOD.format(200)),
    Cluster("H100", H100, 8, _wire(450, NVLINK), _wire(50, NETWORK), _SUPERPOD.format(400)),
    Cluster("H200", H200, 8, _wire(450, NVLINK), _wire(50, NETWORK), _SUPERPOD.format(400)),
    Cluster("TPU v5p", V5P, 8960, _wire(180, 1e-6), _wire(6.25, NETWORK), _POD),
    Cluster("T4", T4, 4, _wire(15.75, PCIE), _wire(6.25, NETWORK), "PCIe 3.0, Ethernet of 50 Gb/s"),
]
CLUSTERS: dict[str, Cluster] = {cluster.name: cluster for cluster in _CLUSTERS}


def cluster(name: str) -> Cluster:
    """Return the cluster of that name, in capitals or not. Raises ValueError, listing all, if there is none."""
    for known, found in CLUSTERS.items():
        if known.lower() == name.lower():
            return found
    raise ValueError(f"there is no cluster of {name!r}; there are {', '.join(CLUSTERS)}")
