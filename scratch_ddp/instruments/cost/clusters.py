"""Clusters: kinds of devices, and what connects them."""

from dataclasses import dataclass

from scratch_ddp.instruments.cost.wire import CALL, NETWORK, PCIE, PRESETS, Link, Wire, by_bandwidth


@dataclass(frozen=True)
class Accelerator:
    """`flops`: operations a second with bfloat16 matrices, at best; `memory`: bytes; `price`: of an hour, in dollars.

    A price is a round figure for hired devices, to be replaced by your own.
    """

    name: str
    flops: float
    memory: float
    price: float = 0.0


@dataclass(frozen=True)
class Cluster:
    """Nodes of `per_node` devices. `inside` connects those of a node; through `between` each reaches other nodes.

    Where devices share network cards, `between` is a device's share of them.
    """

    name: str
    device: Accelerator
    per_node: int
    inside: Link
    between: Link

    def wire(self, ranks: int, apart: int = 1) -> Wire:
        """What connects a group of `ranks` devices, each `apart` from the next.

        It leaves a node on the network ports of all its devices there, while groups like it take the others.
        """
        return Wire(self.inside, self.between, ranks, max(1, self.per_node // apart), trees=True)


# Operations and memory: NVIDIA's data sheets (BF16 without sparsity; of the T4 FP16) and Google Cloud's. Links: NVIDIA
# DGX SuperPOD, eight devices over NVLink with a port each; AWS g4dn.12xlarge, four T4 with Ethernet of 50 Gb/s for all
# of them. TPU v5p: J. Austin et al., "How to Scale Your Model", 2025: 8960 chips, 90 GB/s a link each way, so 180 on a
# ring, and three rings; Google Cloud: 50 Gb/s to other pods. Its latency, a hop of about 1 µs, is a guess.
_NVLINK_4, _NDR = PRESETS["NVLink 4"], PRESETS["InfiniBand NDR"]
_ICI, _POD_TO_POD = Link(CALL, 1 / 180e9, "ICI", per_round=1e-6), by_bandwidth("between pods", 6.25, NETWORK, "")
_OF_T4 = by_bandwidth("PCIe of T4", 1e-9 / PRESETS["T4 over PCIe"].beta, PCIE, "")
_CLUSTERS = [
    Cluster("A100 HDR", Accelerator("A100", 312e12, 80e9, 1.5), 8, PRESETS["NVLink 3"], PRESETS["InfiniBand HDR"]),
    Cluster("H100", Accelerator("H100", 989e12, 80e9, 2.5), 8, _NVLINK_4, _NDR),
    Cluster("H200", Accelerator("H200", 989e12, 141e9, 3.5), 8, _NVLINK_4, _NDR),
    Cluster("TPU v5p", Accelerator("TPU v5p", 459e12, 95 * 2**30, 4.2), 8960, _ICI, _POD_TO_POD),
    Cluster("T4", Accelerator("T4", 65e12, 16e9, 0.35), 4, _OF_T4, by_bandwidth("of a T4", 50 / 8 / 4, NETWORK, "")),
]
CLUSTERS: dict[str, Cluster] = {cluster.name: cluster for cluster in _CLUSTERS}
