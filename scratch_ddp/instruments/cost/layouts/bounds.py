"""Computing or sending: from which batch on a device computes for longer than it sends.

A device that has t tokens does 2 P t operations in forward with a block of P weights, most of which it has to gather:
about 2 P bytes in bfloat16. So the weights cancel, and what counts is how many operations a device does while one byte
travels, C/W. The backward does twice of both. Source for the mesh: J. Austin et al., "How to Scale Your Model", 2025,
part 5.
"""

import math
from dataclasses import dataclass

from scratch_ddp.instruments.cost.layouts.clusters import Cluster
from scratch_ddp.instruments.cost.layouts.layout import Layout, rank_memory
from scratch_ddp.instruments.cost.transformer.flops import forward_flops_of_block
from scratch_ddp.instruments.cost.transformer.shape import ModelShape
from scratch_ddp.instruments.cost.wire import Wire, refuse_unless_finite


def operations_per_byte(cluster: Cluster, ranks: int, apart: int = 1, efficiency: float = 1.0) -> float:
    """C/W: operations that a device does while a byte travels in a group of so many ranks, each `apart` from the next.

    Raises ValueError for an efficiency that is not above 0 and at most 1.
    """
    if not 0 < efficiency <= 1:
        raise ValueError(f"efficiency must be above 0 and at most 1, not {efficiency!r}")
    return cluster.device.flops * efficiency * cluster.wire(ranks, apart).beta


def tokens_to_be_compute_bound(flops: float, wire: Wire, weights: float, tp: int = 1, element: int = 2) -> int:
    """The least tokens of a replica (of `tp` devices) with which a block computes as long as the next one is gathered.

    `weights`: of a block, of which each of the tp devices gathers its part from wire.world_size ranks; `flops`: of a
    device. Raises ValueError for figures that are negative, infinite or NaN, and for flops or weights of 0.
    """
    refuse_unless_finite(flops=flops, weights=weights)
    if not (flops and weights and tp >= 1):
        raise ValueError(f"flops, weights and tp must be more than 0, not {flops!r}, {weights!r} and {tp!r}")
    return math.ceil(wire.all_gather(element * weights / tp) * flops * tp / (2 * weights))


@dataclass(frozen=True)
class Mesh:
    """The best mesh of n devices: `x` replicas share out the weights (FSDP), each of `y` devices (tensor parallel)."""

    x: float
    y: float
    tokens: float  # of a device, from which on both kinds of messages take less time than computing


def best_mesh(n: int, inner: int, ratio: float, x_axes: int = 1, y_axes: int = 1) -> Mesh:
    """The mesh X · Y = n that is compute-bound with fewest tokens, if messages of both kinds travel at the same time.

    `ratio`: C/W of one axis of the network; `x_axes`, `y_axes`: how many serve FSDP and tensor parallelism; `inner`:
    the MLP's width, of a model of two matrices. Tensor parallelism is compute-bound for Y ≤ inner · y_axes / ratio,
    whatever the batch; FSDP then from ratio / (Y · x_axes) tokens a device on. Y is not rounded. Raises ValueError for
    no device and for figures that are not above 0.
    """
    if n < 1:
        raise ValueError(f"there must be at least 1 device, not {n}")
    refuse_unless_finite(ratio=ratio, inner=inner)
    if not (ratio and inner and x_axes and y_axes):
        raise ValueError("ratio, inner and axes must be more than 0")
    y = min(max(1.0, inner * y_axes / ratio), n)
    return Mesh(n / y, y, ratio / (y * x_axes) if n > y else 0.0)


BOUNDS = ("compute", "FSDP's messages", "tensor parallel's messages", "memory", "too few sequences")


def what_binds(
    shape: ModelShape,
    cluster: Cluster,
    devices: int,
    batch: int,
    sequence: int,
    tp: int = 1,
    checkpointing: bool = False,
    usable: float = 0.9,
) -> str:
    """Return which of BOUNDS sets the pace under ZeRO-3 over devices / tp replicas, each of tp devices.

    `batch`: sequences in a step. A replica takes as many at once as the memory holds: each micro-batch gathers every
    block twice and scatters its gradient once. Devices compute at their peak. Raises ValueError as `Layout` and
    `rank_memory` do, and unless tp divides the devices.
    """
    if devices < 1 or devices % tp:
        raise ValueError(f"{devices} devices can't be shared by replicas of {tp}")
    replicas = devices // tp
    if batch < replicas:
        return "too few sequences"
    stage = "ZeRO-3" if replicas > 1 else "DDP"
    one, two = (rank_memory(shape, Layout(replicas, tp, 1, m, 1, stage, checkpointing), sequence).total for m in (1, 2))
    room = usable * cluster.device.memory
    if one > room:
        return "memory"
    micro = min(batch // replicas, 1 + int((room - one) / (two - one)))
    tokens = micro * sequence
    passes = 4 if checkpointing else 3
    compute = passes * tokens * forward_flops_of_block(shape, sequence) / (tp * cluster.device.flops)
    messages = 3 * cluster.wire(replicas, tp).all_gather(2 * shape.block / tp)
    parts = 2 if shape.heads else 1
    tensor = (passes - 1) * 2 * parts * cluster.wire(tp).all_gather(2 * tokens * shape.width)
    if messages > compute + tensor:
        return "FSDP's messages"
    return "tensor parallel's messages" if tensor > compute else "compute"
