"""Computing or sending: from which batch on a device computes for longer than it sends.

A device that has t tokens does 2 P t operations in forward with a block of P weights, most of which it has to gather:
about 2 P bytes in bfloat16. So the weights cancel, and what counts is how many operations a device does while one byte
travels. The backward does twice of both. Source: J. Austin et al., "How to Scale Your Model", 2025, part 5.
"""

import math

from scratch_ddp.instruments.cost.layouts import Cluster, Layout, rank_memory
from scratch_ddp.instruments.cost.models import ModelShape, forward_flops_of_block
from scratch_ddp.instruments.cost.wire import Wire


def tokens_to_be_compute_bound(flops: float, wire: Wire, weights: float, tp: int = 1, element: int = 2) -> int:
    """The least tokens of a replica (of `tp` devices) with which a block computes as long as the next one is gathered.

    `weights`: of a block, of which each of the tp devices gathers its part from wire.world_size ranks; `flops`: of a
    device.
    """
    return math.ceil(wire.all_gather(element * weights / tp) * flops * tp / (2 * weights))


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
