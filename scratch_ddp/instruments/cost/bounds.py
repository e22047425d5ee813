"""Computing or sending: from which batch on a device computes for longer than it sends.

A device that has t tokens does 2 P t operations in forward with a block of P weights, most of which it has to gather:
about 2 P bytes in bfloat16. So the weights cancel, and what counts is how many operations a device does while one byte
travels. The backward does twice of both. Source: J. Austin et al., "How to Scale Your Model", 2025, part 5.
"""

import math

from scratch_ddp.instruments.cost.clusters import Cluster
from scratch_ddp.instruments.cost.layouts import Layout, rank_memory
from scratch_ddp.instruments.cost.models import ModelShape
from scratch_ddp.instruments.cost.plan import USABLE
from scratch_ddp.instruments.cost.times import step_time
from scratch_ddp.instruments.cost.wire import Wire

BOUNDS = ("compute", "FSDP's messages", "tensor parallel's messages", "memory", "too few sequences")


def tokens_to_be_compute_bound(flops: float, wire: Wire, weights: float, tp: int = 1, element: int = 2) -> int:
    """The least tokens of a replica (of `tp` devices) with which a block computes as long as the next one is gathered.

    `weights`: of a block, of which each of the tp devices gathers its part from wire.world_size ranks; `flops`: of a
    device.
    """
    return math.ceil(wire.all_gather(element * weights / tp) * flops * tp / (2 * weights))


def what_binds(
    shape: ModelShape,
    cluster: Cluster,
    devices: int,
    batch: int,
    sequence: int,
    tp: int = 1,
    checkpointing: bool = False,
) -> str:
    """Return which of BOUNDS sets the pace under ZeRO-3 over devices / tp replicas, each of tp devices.

    `batch`: sequences in a step. A replica takes as many at once as the memory holds: each micro-batch gathers every
    block twice and scatters its gradient once. Devices compute at their peak.
    """
    replicas = devices // tp
    if batch < replicas:
        return "too few sequences"

    def layout(micro: int) -> Layout:
        return Layout(replicas, tp, 1, micro, 1, "ZeRO-3" if replicas > 1 else "DDP", checkpointing)

    one, two = (rank_memory(shape, layout(micro), sequence).total for micro in (1, 2))
    room = USABLE * cluster.device.memory
    if one > room:
        return "memory"
    micro = min(batch // replicas, 1 + int((room - one) / (two - one)))
    step = step_time(shape, layout(micro), cluster, sequence, efficiency=1.0)
    messages = 3 * shape.blocks * cluster.wire(replicas, tp).all_gather(2 * shape.block / tp)
    if messages > step.compute + step.tensor:
        return "FSDP's messages"
    return "tensor parallel's messages" if step.tensor > step.compute else "compute"
