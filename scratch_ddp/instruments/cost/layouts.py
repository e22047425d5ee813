"""Layouts: how a model's training is spread over devices, and what one of its ranks holds."""

import math
from dataclasses import dataclass, replace

from scratch_ddp.instruments.cost.models import ModelShape, bytes_per_token
from scratch_ddp.instruments.cost.states import MIXED, Precision, RankMemory, model_states

_LOGIT = 2 + 3 * 4  # bytes at the loss, at its peak: in bfloat16, and in float32 it, its logarithm and its gradient


@dataclass(frozen=True)
class Layout:
    """dp replicas of a pipeline of pp stages, each of tp ranks that share its matrices: dp · tp · pp devices.

    micro: sequences in a micro-batch · micro_batches: of a replica in a step · stage: "DDP" or one of ZeRO's; ZeRO-3
    without a pipeline only, since it would gather the stage again for every micro-batch · checkpointing: True keeps
    only the input of each block, and does its forward again in backward; "selective" does again what costs little ·
    chunks: of the model on each rank of an interleaved pipeline; 1 is 1F1B · shards: over how many of the dp replicas
    ZeRO-3 shards, which then average their gradients with the others (HSDP); 0: over all. Raises ValueError for what
    can't be.
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
        """Sequences in a step, on all devices: the global batch."""
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
    """How many blocks each stage of a pipeline has: as alike as can be, fewer on the first and the last.

    Raises ValueError if there are fewer blocks than stages.
    """
    if pp > blocks:
        raise ValueError(f"{blocks} blocks can't be cut into {pp} stages")
    inner_first = sorted(range(pp), key=lambda stage: (stage in (0, pp - 1), stage))
    more = set(inner_first[: blocks % pp])
    return [blocks // pp + (stage in more) for stage in range(pp)]


def parameters_of_rank(shape: ModelShape, layout: Layout, stage: int) -> int:
    """Parameters of a rank of this stage of the pipeline, before ZeRO: tp cuts matrices, not norms and biases.

    The biases of a column-parallel layer are cut in truth: a difference far below a thousandth.
    """
    blocks = blocks_of_stages(shape.blocks, layout.pp)[stage]
    first, last = stage == 0, stage == layout.pp - 1
    head = shape.head if last and not (shape.tied and first) else 0
    matrices = blocks * (shape.block - shape.norms) + (shape.embedding + shape.beside) * first + head
    return math.ceil(matrices / layout.tp) + blocks * shape.norms + shape.last_norm * last


def rank_memory(shape: ModelShape, layout: Layout, sequence: int, precision: Precision = MIXED) -> RankMemory:
    """Return what the fullest rank holds at the worst moment of a step: that of the pipeline's stage with most bytes.

    Buffers of libraries, fragments of the allocator and what a single operation needs for a moment are extra. Raises
    ValueError for a mixture of experts.
    """
    stages = sorted({0, min(1, layout.pp - 1), layout.pp - 1})  # of those in the middle the second holds most
    each = (_stage_memory(shape, layout, stage, sequence, precision) for stage in stages)
    return max(each, key=lambda memory: memory.total)


def _stage_memory(shape: ModelShape, layout: Layout, stage: int, sequence: int, precision: Precision) -> RankMemory:
    blocks, tokens = blocks_of_stages(shape.blocks, layout.pp)[stage], layout.micro * sequence
    p, v = layout.pp, layout.chunks
    warm_up = p - stage if v == 1 else ((v - 1) * p + 2 * (p - stage) - 1) / v  # 1F1B, interleaved
    kept = blocks * min(warm_up, layout.micro_batches)
    kept *= bytes_per_token(shape, checkpointing=layout.checkpointing, tp=layout.tp)
    if layout.checkpointing:  # and the block whose forward is done again
        kept += bytes_per_token(shape, tp=layout.tp)
    logits = _LOGIT * shape.vocabulary * tokens / layout.tp if stage == p - 1 else 0.0
    # Two blocks are whole at once under ZeRO-3.
    gathered = 2 * math.ceil(shape.block / layout.tp) if layout.stage == "ZeRO-3" and layout.dp > 1 else 0
    parameters, shards = parameters_of_rank(shape, layout, stage), layout.shards or layout.dp
    states = model_states(parameters, shards, layout.stage, precision, gathered)
    return replace(states, activations=tokens * kept, logits=logits)
