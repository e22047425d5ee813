"""Layouts: how a model's training is spread over devices, what one of its ranks holds, and how long a step takes.

Left out of a step are the optimizer, loading data, and what waits for memory, except as far as `efficiency` stands for
them. In backward nothing hides tensor parallelism's messages here; Megatron hides half of them.
"""

import math
from dataclasses import astuple, dataclass, replace

from scratch_ddp.instruments.cost.models import (
    ModelShape,
    bytes_per_token,
    forward_flops_of_block,
    refuse_mixture,
    weights_of,
)
from scratch_ddp.instruments.cost.states import MIXED, Precision, RankMemory, model_states
from scratch_ddp.instruments.cost.wire import Cluster, Wire

_LOGIT = 2 + 3 * 4  # bytes at the loss, at its peak: in bfloat16, and in float32 it, its logarithm and its gradient
EFFICIENCY = 0.55  # of the peak, while a device computes: fits large models, within 11 % (see `published`)
EFFICIENCIES = (0.36, 0.62)  # between these are the published runs, small models on slower H100 at the lower end
_ELEMENT = 2  # bytes of a number in activations
_LITTLE = 0.05  # of a forward: norms and activations done again, which wait for memory (1.8 % of a step of an 8B)


@dataclass(frozen=True)
class Layout:
    """dp replicas of a pipeline of pp stages, each of tp ranks that share its matrices: dp · tp · pp devices.

    micro: sequences in a micro-batch · micro_batches: of a replica in a step · stage: "DDP" or one of ZeRO's, ZeRO-3
    without a pipeline only · checkpointing: True keeps only each block's input; "selective" also what matrices and the
    attention put out, so that what is done again costs little; "half" the attention's and every second matrix's, as
    torchtitan does · chunks: of the model on each rank of an interleaved pipeline; 1 is 1F1B · shards: over how many
    replicas ZeRO-3 shards (HSDP); 0: over all. Raises ValueError for what can't be.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    micro: int = 1
    micro_batches: int = 1
    stage: str = "DDP"
    checkpointing: bool | str = False
    chunks: int = 1
    shards: int = 0

    def __post_init__(self) -> None:
        if min(self.dp, self.tp, self.pp, self.micro, self.micro_batches, self.chunks) < 1:
            raise ValueError(f"a layout's numbers are 1 or more, not as in {self}")
        if self.stage == "ZeRO-3" and self.pp > 1:
            raise ValueError("ZeRO-3 with a pipeline would gather each stage again for every micro-batch: take ZeRO-2")
        if self.chunks > 1 and (self.pp == 1 or self.micro_batches % self.pp):
            raise ValueError("an interleaved pipeline needs two stages or more, and micro-batches in multiples of them")
        if self.shards and (self.stage != "ZeRO-3" or self.dp % self.shards):
            raise ValueError(f"HSDP is ZeRO-3 over a part of the replicas: {self.shards} shards don't fit {self}")

    @property
    def devices(self) -> int:
        return self.dp * self.tp * self.pp

    @property
    def batch(self) -> int:
        """Sequences in a step, on all devices."""
        return self.dp * self.micro * self.micro_batches

    @property
    def sharding(self) -> str:
        """What is sharded, in a word: the stage, or HSDP with the number of shards."""
        if self.dp == 1:
            return "–"
        return f"HSDP {self.shards}" if self.shards not in (0, self.dp) else self.stage

    def __str__(self) -> str:
        kept = {False: "", True: ", checkpointing"}.get(self.checkpointing, f", {self.checkpointing} checkpointing")
        sharding = f", {self.sharding}" if self.dp > 1 else ""
        parts = f"dp {self.dp} × tp {self.tp} × pp {self.pp}{sharding}"
        chunks = f" in {self.chunks} chunks a rank" if self.chunks > 1 else ""
        batches = f"{self.micro_batches} micro-batch{'es' * (self.micro_batches > 1)} of {self.micro}"
        return f"{parts}, {batches}{chunks}{kept}"


def blocks_of_stages(blocks: int, pp: int) -> list[int]:
    """Blocks of each stage, as alike as can be, fewer on both ends. Raises ValueError if there are too few."""
    if pp > blocks:
        raise ValueError(f"{blocks} blocks can't be cut into {pp} stages")
    fewest, more = divmod(blocks, pp)
    first = 0 if more == pp - 1 else 1
    return [fewest + (first <= stage < first + more) for stage in range(pp)]


def parameters_of_rank(shape: ModelShape, layout: Layout, stage: int) -> int:
    """Parameters of a rank of this stage of the pipeline, before ZeRO: tp cuts matrices, not norms and biases."""
    blocks = blocks_of_stages(shape.blocks, layout.pp)[stage]
    first, last = stage == 0, stage == layout.pp - 1
    head = shape.head if last and not (shape.tied and first) else 0
    matrices = blocks * (shape.block - shape.norms) + (shape.embedding + shape.beside) * first + head
    return math.ceil(matrices / layout.tp) + blocks * shape.norms + shape.last_norm * last


def rank_memory(shape: ModelShape, layout: Layout, sequence: int, precision: Precision = MIXED) -> RankMemory:
    """What the fullest rank holds at the worst moment of a step. Raises ValueError for a mixture of experts."""
    p, v, tokens = layout.pp, layout.chunks, layout.micro * sequence
    of_block = bytes_per_token(shape, checkpointing=layout.checkpointing, tp=layout.tp)
    again = bytes_per_token(shape, tp=layout.tp) if layout.checkpointing else 0.0  # a block whose forward is repeated
    # Two blocks are whole at once under ZeRO-3.
    gathered = 2 * math.ceil(shape.block / layout.tp) if layout.stage == "ZeRO-3" and layout.dp > 1 else 0
    shards, found = layout.shards or layout.dp, []
    for stage in sorted({0, min(1, p - 1), p - 1}):  # of those in the middle the second holds most
        states = model_states(parameters_of_rank(shape, layout, stage), shards, layout.stage, precision, gathered)
        warm_up = p - stage if v == 1 else ((v - 1) * p + 2 * (p - stage) - 1) / v  # 1F1B, interleaved
        kept = blocks_of_stages(shape.blocks, p)[stage] * min(warm_up, layout.micro_batches) * of_block + again
        logits = _LOGIT * shape.vocabulary * tokens / layout.tp if stage == p - 1 else 0.0
        found.append(replace(states, activations=tokens * kept, logits=logits))
    return max(found, key=lambda memory: memory.total)


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step of the slowest rank, in parts that nothing else hides. Messages: tensor, pipeline, data."""

    compute: float
    tensor: float = 0.0
    pipeline: float = 0.0
    bubble: float = 0.0
    data: float = 0.0

    @property
    def total(self) -> float:
        return sum(astuple(self))


def step_time(
    shape: ModelShape,
    layout: Layout,
    cluster: Cluster,
    sequence: int,
    efficiency: float = EFFICIENCY,
    precision: Precision = MIXED,
) -> StepTime:
    """A step's forecast, at this share of the devices' peak. Raises ValueError for a mixture of experts."""
    refuse_mixture(shape)
    m, p, v = layout.micro_batches, layout.pp, layout.chunks
    tokens, speed = layout.micro * sequence, cluster.device.flops * efficiency * layout.tp
    block = tokens * forward_flops_of_block(shape, sequence) / speed
    head = tokens * 2 * shape.head / speed
    # Before attention and MLP tokens are gathered over tp, and behind them scattered.
    sent = (4 if shape.heads else 2) * cluster.wire(layout.tp).all_gather(_ELEMENT * tokens * shape.width)
    half = 2 * weights_of(shape.matrices[1::2]) / forward_flops_of_block(shape, sequence)
    again = {False: 0, "selective": _LITTLE, "half": _LITTLE + half, True: 1}[layout.checkpointing]  # of a forward
    resent = 1 + (layout.checkpointing is True)  # messages of backward, in units of forward's

    stages = blocks_of_stages(shape.blocks, p)
    heads = [0.0] * (p - 1) + [head]
    blocks, head = max(zip(stages, heads, strict=True), key=lambda stage: stage[0] * block + stage[1])  # the slowest
    forward = blocks * (block + sent) + head
    backward = blocks * ((2 + again) * block + resent * sent) + 2 * head
    computes, tensor = m * (blocks * (3 + again) * block + 3 * head), m * blocks * (1 + resent) * sent
    hop = hop_wire(layout, cluster).message(_ELEMENT * tokens * shape.width / layout.tp)
    # In 1F1B the first forward passes p − 1 wires, and its gradient passes them back. While the pipeline fills, each
    # rank waits for one gradient more than it has forwards to do. Then p micro-batches share each round trip. (Within
    # 4 % of `cost.pipelined`, which goes through it.) An interleaved pipeline hides all but the first and the last.
    shared = max(0, m - p) * 2 * (p - 1) / p
    hops = 2 * (p - 1) + 2 * max(0, min(m, p) - 2) + shared if v == 1 else 2 * (p * v - 1)
    data = _data(shape, layout, cluster, forward, backward, precision)
    return StepTime(computes, tensor, hops * hop, (p - 1) / v * (forward + backward), data)


def hop_wire(layout: Layout, cluster: Cluster) -> Wire:
    """What connects two stages of a pipeline: those of two nodes, if it doesn't fit into one."""
    return cluster.wire(2, layout.tp if layout.tp * layout.pp <= cluster.per_node else cluster.per_node)


def _data(
    shape: ModelShape, layout: Layout, cluster: Cluster, forward: float, backward: float, precision: Precision
) -> float:
    """Seconds that messages of data parallelism stick out of a step; `forward`, `backward`: of a micro-batch."""
    if layout.dp == 1:
        return 0.0
    m, stage, shards = layout.micro_batches, layout.stage, layout.shards or layout.dp
    wire = cluster.wire(shards, layout.tp * layout.pp)
    reduce = wire.all_reduce if stage == "DDP" else wire.all_gather
    if layout.pp > 1:  # gradients are complete with the last micro-batch: its last chunk's messages come after it
        parameters = max(parameters_of_rank(shape, layout, each) for each in (0, 1, layout.pp - 1))
        reduced = reduce(precision.gradients * parameters)
        gathered = 0.0 if stage == "DDP" else wire.all_gather(precision.weights * parameters)
        # ZeRO-2 has reduced those of each micro-batch while the next one computed
        early = (m - 1) * max(0.0, reduced - forward - backward) if stage == "ZeRO-2" else 0.0
        return early + (reduced + gathered) / layout.chunks

    blocks, block = shape.blocks, shape.block / layout.tp
    ends = (shape.embedding + shape.head * (not shape.tied)) / layout.tp
    gather = wire.all_gather(precision.weights * block) if stage == "ZeRO-3" else 0.0
    took = sharded_pass(blocks, forward, backward, gather, reduce(precision.gradients * block)) - forward - backward
    if ends:
        took += reduce(precision.gradients * ends) + (wire.all_gather(precision.weights * ends) if gather else 0.0)
    gathered = wire.all_gather(precision.weights * (blocks * block + ends)) if stage in ("ZeRO-1", "ZeRO-2") else 0.0
    between = cluster.wire(layout.dp // shards, layout.tp * shards)  # HSDP averages shards there meanwhile
    average = sharded_pass(blocks, 0.0, backward, 0.0, between.all_reduce(precision.gradients * block / shards))
    return took * (m if stage in ("ZeRO-2", "ZeRO-3") else 1) + gathered + average - backward


def sharded_pass(blocks: int, forward: float, backward: float, gather: float, scatter: float) -> float:
    """Seconds of forward and backward of equal blocks under ZeRO-3, each gathered while the one before computes.

    `forward`, `backward`: of all blocks; `gather`: of a block's weights, 0 where they are whole; `scatter`: of its
    gradient. The last block stays whole in between. Messages queue for one wire.
    """
    clock, wire, there = 0.0, gather, gather  # there: when the next block is whole
    for step in range(2 * blocks):
        whole = there
        if gather and step + 1 not in (blocks, 2 * blocks):
            there = wire = max(wire, clock) + gather
        clock = max(clock, whole) + (forward if step < blocks else backward) / blocks
        if step >= blocks:
            wire = max(wire, clock) + scatter
    return wire
