"""The seconds of a step under a layout: computing, what tensor parallelism sends, the bubble, and data parallelism.

What is left out: the optimizer's own computing, loading data, and operations that wait for memory rather than compute,
except as far as `efficiency` stands for them. Groups send over wires of their own, as if they never met on one.
"""

from dataclasses import dataclass, fields

from scratch_ddp.instruments.cost.layouts.clusters import Cluster
from scratch_ddp.instruments.cost.layouts.layout import Layout, blocks_of_stages
from scratch_ddp.instruments.cost.step import Backward, per_parameter
from scratch_ddp.instruments.cost.transformer.activations import refuse_mixture
from scratch_ddp.instruments.cost.transformer.flops import (
    flops_per_token,
    forward_flops_of_block,
    forward_flops_of_head,
)
from scratch_ddp.instruments.cost.transformer.shape import ModelShape
from scratch_ddp.instruments.cost.wire import Wire

EFFICIENCY = 0.6  # of the peak, while a device computes: what large matrices with everything around them reach
_ELEMENT = 2  # bytes of a number that is sent


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
        return sum(getattr(self, field.name) for field in fields(self))

    @property
    def binds(self) -> str:
        """The part that takes longest."""
        return max((field.name for field in fields(self)), key=lambda name: getattr(self, name))


def step_time(
    shape: ModelShape, layout: Layout, cluster: Cluster, sequence: int, efficiency: float = EFFICIENCY
) -> StepTime:
    """Return the forecast of a step, in which every replica takes `micro_batches` micro-batches.

    Raises ValueError for a mixture of experts, no tokens, or an efficiency that is not above 0 and at most 1.
    """
    refuse_mixture(shape, "step")
    if not 0 < efficiency <= 1:
        raise ValueError(f"efficiency must be above 0 and at most 1, not {efficiency!r}")
    if sequence < 1:
        raise ValueError(f"a sequence must have 1 token or more, not {sequence}")
    tokens, speed = layout.micro * sequence, cluster.device.flops * efficiency * layout.tp
    block = tokens * forward_flops_of_block(shape, sequence) / speed
    head = tokens * forward_flops_of_head(shape) / speed
    passes = 2 if layout.checkpointing else 1  # a forward again in backward
    sent = _sent_by_block(shape, layout, cluster, tokens)
    stages = blocks_of_stages(shape.blocks, layout.pp)
    slowest = max(range(layout.pp), key=lambda s: stages[s] * block + head * (s == layout.pp - 1))
    heads = head * (slowest == layout.pp - 1)
    forward = stages[slowest] * (block + sent) + heads
    backward = stages[slowest] * ((1 + passes) * block + passes * sent) + 2 * heads
    computes = stages[slowest] * (2 + passes) * block + 3 * heads
    m, p = layout.micro_batches, layout.pp
    tensor = m * stages[slowest] * (1 + passes) * sent
    if p > 1:
        hop = cluster.wire(2, layout.tp).message(_ELEMENT * tokens * shape.width / layout.tp)
        return StepTime(
            m * computes,
            tensor,
            hops(p, m, hop) if layout.chunks == 1 else 2 * (p * layout.chunks - 1) * hop,  # the others are hidden
            (p - 1) / layout.chunks * (forward + backward),
            _after_backward(shape, layout, cluster, stages),
        )
    data = _during_backward(shape, layout, cluster, forward, backward)
    return StepTime(m * computes, tensor, data=data)


def hops(p: int, m: int, hop: float) -> float:
    """Seconds that messages of `hop` seconds add to 1F1B of m micro-batches on p ranks.

    The first forward passes p − 1 wires, and its gradient passes them back. While the pipeline fills, each rank waits
    for a gradient once more than it has forwards to do meanwhile. Then p micro-batches share each round trip. (Within
    4 % of `cost.pipelined`, which goes through every action.)
    """
    if p == 1:
        return 0.0
    return hop * (2 * (p - 1) + 2 * max(0, min(m, p) - 2) + max(0, m - p) * 2 * (p - 1) / p)


def _sent_by_block(shape: ModelShape, layout: Layout, cluster: Cluster, tokens: int) -> float:
    """Seconds of a block's messages in forward, and again in backward: attention and MLP gather and scatter tokens."""
    wire = cluster.wire(layout.tp)
    parts = 2 if shape.heads else 1
    return 2 * parts * wire.all_gather(_ELEMENT * tokens * shape.width)


def _after_backward(shape: ModelShape, layout: Layout, cluster: Cluster, stages: list[int]) -> float:
    """In a pipeline gradients are complete with the last micro-batch: all messages come after it."""
    wire = cluster.wire(layout.dp, layout.tp * layout.pp)
    ends = [shape.embedding, *[0] * (layout.pp - 2), shape.head]
    nbytes = max(blocks * shape.block + end for blocks, end in zip(stages, ends, strict=True)) * _ELEMENT / layout.tp
    return _gradients(layout, wire, nbytes)


def _gradients(layout: Layout, wire: Wire, nbytes: float) -> float:
    if layout.stage == "ZeRO-2":
        return 2 * wire.all_gather(nbytes)  # scattered gradients, gathered weights
    return wire.all_reduce(nbytes) + (wire.all_gather(nbytes) if layout.stage == "ZeRO-1" else 0.0)


def _during_backward(shape: ModelShape, layout: Layout, cluster: Cluster, forward: float, backward: float) -> float:
    """What sticks out of the last micro-batch's backward; under ZeRO-3 of every micro-batch's passes."""
    wire, block = cluster.wire(layout.dp, layout.tp), _ELEMENT * shape.block / layout.tp
    if layout.dp == 1:
        return 0.0
    if layout.stage == "ZeRO-3":
        took = sharded_pass(shape.blocks, forward, backward, wire.all_gather(block))
        outside = 2 * wire.all_gather(_outside(shape, layout)) * bool(shape.vocabulary)  # first gather, last scatter
        return layout.micro_batches * (took - forward - backward + outside)
    if layout.stage == "ZeRO-2":
        return _gradients(layout, wire, shape.blocks * block + _outside(shape, layout))
    ready = Backward.in_proportion([int(block)] * shape.blocks, backward)
    exposed = per_parameter(ready, wire).exposed + wire.all_reduce(_outside(shape, layout)) * bool(shape.vocabulary)
    return exposed + (wire.all_gather(shape.blocks * block) if layout.stage == "ZeRO-1" else 0.0)


def _outside(shape: ModelShape, layout: Layout) -> float:
    """Bytes of embedding and head."""
    return _ELEMENT * (shape.embedding + shape.head * (not shape.tied)) / layout.tp


def sharded_pass(blocks: int, forward: float, backward: float, message: float) -> float:
    """Seconds of forward and backward of equal blocks under ZeRO-3, each gathered while the one before computes.

    `forward`, `backward`: of all blocks; `message`: seconds to gather a block, or to scatter its gradient. The last
    block stays whole in between. Messages queue for one wire, and the last one ends the pass.
    """
    clock = wire = 0.0

    def sent() -> float:
        nonlocal wire
        wire = max(wire, clock) + message
        return wire

    there = [sent()]
    for i in range(blocks):
        if i + 1 < blocks:
            there.append(sent())
        clock = max(clock, there[i]) + forward / blocks
    if blocks > 1:
        there[blocks - 2] = sent()
    for i in reversed(range(blocks)):
        if 0 < i < blocks - 1:
            there[i - 1] = sent()
        clock = max(clock, there[i]) + backward / blocks
        scattered = sent()
    return scattered


def tflops_of_device(
    shape: ModelShape, layout: Layout, cluster: Cluster, sequence: int, efficiency: float = EFFICIENCY
) -> float:
    """The operations in 10¹² a second that each device does in a step: those of the model, and those done again."""
    took = step_time(shape, layout, cluster, sequence, efficiency).total
    flops = flops_per_token(shape, sequence, layout.checkpointing) * layout.batch * sequence
    return flops / took / layout.devices / 1e12
