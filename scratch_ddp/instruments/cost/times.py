"""The seconds of a step under a layout: computing, what tensor parallelism sends, the bubble, and data parallelism.

What is left out: the optimizer's own computing, loading data, and operations that wait for memory rather than compute,
except as far as `efficiency` stands for them. In backward nothing hides tensor parallelism's messages here; Megatron
hides half of them behind the gradients of weights.
"""

from dataclasses import astuple, dataclass

from scratch_ddp.instruments.cost.clusters import Cluster
from scratch_ddp.instruments.cost.layouts import Layout, blocks_of_stages, parameters_of_rank
from scratch_ddp.instruments.cost.models import ModelShape, forward_flops_of_block, refuse_mixture
from scratch_ddp.instruments.cost.states import MIXED, Precision
from scratch_ddp.instruments.cost.wire import Wire

EFFICIENCY = 0.55  # of the peak, while a device computes: fits large models, within 11 % (see `published`)
EFFICIENCIES = (0.38, 0.62)  # between these are the published runs, small models on slower H100 at the lower end
_ELEMENT = 2  # bytes of a number in activations
_LITTLE = 0.05  # of a forward: norms and activations done again, which wait for memory (1.8 % of a step of an 8B)


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step of the slowest rank, by what it does: each part is time that nothing else hides.

    compute · tensor: messages of tensor parallelism · pipeline: messages between stages · bubble: waiting for other
    stages · data: messages of data parallelism that stick out
    """

    compute: float
    tensor: float = 0.0
    pipeline: float = 0.0
    bubble: float = 0.0
    data: float = 0.0

    @property
    def total(self) -> float:
        return sum(astuple(self))

    @property
    def binds(self) -> str:
        """The part that takes longest."""
        return max(vars(self), key=vars(self).get)


def step_time(
    shape: ModelShape,
    layout: Layout,
    cluster: Cluster,
    sequence: int,
    efficiency: float = EFFICIENCY,
    precision: Precision = MIXED,
) -> StepTime:
    """Return the forecast of a step, in which every replica takes `micro_batches` micro-batches.

    `efficiency`: the share of its peak that a device reaches while it computes. Raises ValueError for a mixture of
    experts.
    """
    refuse_mixture(shape)
    m, p, v = layout.micro_batches, layout.pp, layout.chunks
    tokens, speed = layout.micro * sequence, cluster.device.flops * efficiency * layout.tp
    block = tokens * forward_flops_of_block(shape, sequence) / speed
    head = tokens * 2 * shape.head / speed
    # Before attention and MLP tokens are gathered over tp, and behind them scattered.
    sent = (4 if shape.heads else 2) * cluster.wire(layout.tp).all_gather(_ELEMENT * tokens * shape.width)
    again = {False: 0, "selective": _LITTLE, True: 1}[layout.checkpointing]  # of a forward, in backward
    resent = 1 + (layout.checkpointing is True)  # messages of backward, in units of forward's

    stages = blocks_of_stages(shape.blocks, p)
    heads = [0.0] * (p - 1) + [head]
    blocks, head = max(zip(stages, heads, strict=True), key=lambda stage: stage[0] * block + stage[1])  # the slowest
    forward = blocks * (block + sent) + head
    backward = blocks * ((2 + again) * block + resent * sent) + 2 * head
    computes, tensor = m * (blocks * (3 + again) * block + 3 * head), m * blocks * (1 + resent) * sent
    data = _data(shape, layout, cluster, forward, backward, precision)
    if p == 1:
        return StepTime(computes, tensor, data=data)
    hop = hop_wire(layout, cluster).message(_ELEMENT * tokens * shape.width / layout.tp)
    messages = hops(p, m, hop) if v == 1 else 2 * (p * v - 1) * hop  # the others are hidden
    return StepTime(computes, tensor, messages, (p - 1) / v * (forward + backward), data)


def hop_wire(layout: Layout, cluster: Cluster) -> Wire:
    """What connects two stages of a pipeline: those of two nodes, if it doesn't fit into one."""
    return cluster.wire(2, layout.tp if layout.tp * layout.pp <= cluster.per_node else cluster.per_node)


def hops(p: int, m: int, hop: float) -> float:
    """Seconds that messages of `hop` seconds add to 1F1B of m micro-batches on p ranks.

    The first forward passes p − 1 wires, and its gradient passes them back. While the pipeline fills, each rank waits
    for a gradient once more than it has forwards to do meanwhile. Then p micro-batches share each round trip. (Within
    4 % of `cost.pipelined`, which goes through every action.)
    """
    return hop * (2 * (p - 1) + 2 * max(0, min(m, p) - 2) + max(0, m - p) * 2 * (p - 1) / p)


def _data(
    shape: ModelShape, layout: Layout, cluster: Cluster, forward: float, backward: float, precision: Precision
) -> float:
    """Seconds that messages of data parallelism stick out of a step; `forward`, `backward`: of a micro-batch."""
    if layout.dp == 1:
        return 0.0
    m, shards = layout.micro_batches, layout.shards or layout.dp
    wire = cluster.wire(shards, layout.tp * layout.pp)
    reduce = wire.all_reduce if layout.stage == "DDP" else wire.all_gather
    if layout.pp > 1:  # gradients are complete with the last micro-batch: its last chunk's messages come after it
        parameters = max(parameters_of_rank(shape, layout, stage) for stage in (0, 1, layout.pp - 1))
        reduced = reduce(precision.reduced * parameters)
        if layout.stage == "DDP":
            return reduced / layout.chunks
        # ZeRO-2 has reduced those of each micro-batch while the next one computed
        early = (m - 1) * max(0.0, reduced - forward - backward) if layout.stage == "ZeRO-2" else 0.0
        return early + (reduced + wire.all_gather(precision.sent * parameters)) / layout.chunks

    blocks, block = shape.blocks, shape.block / layout.tp
    ends = (shape.embedding + shape.head * (not shape.tied)) / layout.tp
    gather = wire.all_gather(precision.sent * block) if layout.stage == "ZeRO-3" else 0.0
    took = sharded_pass(blocks, forward, backward, gather, reduce(precision.reduced * block)) - forward - backward
    took += reduce(precision.reduced * ends) if ends else 0.0
    if layout.stage == "DDP":
        return took
    if layout.stage != "ZeRO-3":
        return took * (m if layout.stage == "ZeRO-2" else 1) + wire.all_gather(precision.sent * (blocks * block + ends))
    took += wire.all_gather(precision.sent * ends) if ends else 0.0
    between = cluster.wire(layout.dp // shards, layout.tp * shards)  # HSDP averages shards there meanwhile
    average = sharded_pass(blocks, 0.0, backward, 0.0, between.all_reduce(precision.reduced * block / shards))
    return m * took + average - backward


def sharded_pass(blocks: int, forward: float, backward: float, gather: float, scatter: float) -> float:
    """Seconds of forward and backward of equal blocks under ZeRO-3, each gathered while the one before computes.

    `forward`, `backward`: of all blocks; `gather`: seconds to gather a block, 0 where weights are whole; `scatter`: its
    gradient. The last block stays whole in between. Messages queue for one wire, and the last one ends the pass.
    """
    clock = wire = 0.0
    there = [0.0] * blocks  # when each block is whole

    def fetch(i: int) -> None:
        nonlocal wire
        if gather and 0 <= i < blocks:
            there[i] = wire = max(wire, clock) + gather

    fetch(0)
    for i in range(blocks):
        fetch(i + 1)
        clock = max(clock, there[i]) + forward / blocks
    fetch(blocks - 2)
    for i in reversed(range(blocks)):
        if i < blocks - 1:
            fetch(i - 1)
        clock = max(clock, there[i]) + backward / blocks
        wire = max(wire, clock) + scatter
    return wire
