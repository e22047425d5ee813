"""A layout, which says how a model's training is spread over devices, and what one of its ranks holds."""

import math
from dataclasses import dataclass, fields

from scratch_ddp.instruments.cost.memory import MIXED, STAGES, ModelStates, Precision, model_states
from scratch_ddp.instruments.cost.transformer.activations import bytes_per_token, logits_bytes
from scratch_ddp.instruments.cost.transformer.shape import ModelShape


@dataclass(frozen=True)
class Layout:
    """dp replicas of a pipeline of pp stages, each of tp ranks that share its matrices: dp · tp · pp devices.

    micro: sequences in a micro-batch · micro_batches: of a replica in a step · stage: "DDP" or one of ZeRO's; ZeRO-3
    without a pipeline only, since it would gather the stage again for every micro-batch · checkpointing: keep only the
    input of each block, and do its forward again in backward · chunks: of the model on each rank of an interleaved
    pipeline; 1 is 1F1B. Raises ValueError for what can't be.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    micro: int = 1
    micro_batches: int = 1
    stage: str = "DDP"
    checkpointing: bool = False
    chunks: int = 1

    def __post_init__(self) -> None:
        for name in ("dp", "tp", "pp", "micro", "micro_batches", "chunks"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a whole number, 1 or more, not {value!r}")
        if self.stage not in STAGES:
            raise ValueError(f"stage: {self.stage!r}; allowed are {', '.join(STAGES)}")
        if self.stage == "ZeRO-3" and self.pp > 1:
            raise ValueError("ZeRO-3 with a pipeline would gather each stage again for every micro-batch: take ZeRO-2")
        if self.chunks > 1 and (self.pp == 1 or self.micro_batches % self.pp):
            raise ValueError("an interleaved pipeline needs two stages or more, and micro-batches in multiples of them")

    @property
    def devices(self) -> int:
        return self.dp * self.tp * self.pp

    @property
    def batch(self) -> int:
        """Sequences in a step, on all devices: the global batch."""
        return self.dp * self.micro * self.micro_batches

    def __str__(self) -> str:
        kept = ", checkpointing" if self.checkpointing else ""
        sharding = f", {self.stage}" if self.dp > 1 else ""
        parts = f"dp {self.dp} × tp {self.tp} × pp {self.pp}{sharding}"
        chunks = f" in {self.chunks} chunks a rank" if self.chunks > 1 else ""
        return (
            f"{parts}, {self.micro_batches} micro-batch{'es' * (self.micro_batches > 1)} of {self.micro}{chunks}{kept}"
        )


@dataclass(frozen=True)
class RankMemory:
    """Bytes that one rank holds at the worst moment of a step, by purpose."""

    weights: float
    gradients: float
    master: float
    optimizer: float
    gathered: float
    activations: float
    logits: float

    @property
    def total(self) -> float:
        return sum(getattr(self, field.name) for field in fields(self))


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
    matrices = blocks * (shape.block - shape.norms) + shape.embedding * first + head
    return math.ceil(matrices / layout.tp) + blocks * shape.norms + shape.last_norm * last


def rank_memory(
    shape: ModelShape,
    layout: Layout,
    sequence: int,
    precision: Precision = MIXED,
    optimizer: str = "AdamW",
    element: int = 2,
) -> RankMemory:
    """Return what the fullest rank holds: that of the pipeline's stage with most bytes.

    Buffers of libraries, fragments of the allocator and what a single operation needs for a moment are extra.
    `element`: bytes of a number in activations. Raises ValueError for a mixture of experts, and for no tokens.
    """
    if sequence < 1:
        raise ValueError(f"a sequence must have 1 token or more, not {sequence}")
    stages = sorted({0, min(1, layout.pp - 1), layout.pp - 1})  # of those in the middle the second holds most
    return max(
        (_stage_memory(shape, layout, each, sequence, precision, optimizer, element) for each in stages),
        key=lambda memory: memory.total,
    )


def _stage_memory(
    shape: ModelShape, layout: Layout, stage: int, sequence: int, precision: Precision, optimizer: str, element: int
) -> RankMemory:
    blocks, tokens = blocks_of_stages(shape.blocks, layout.pp)[stage], layout.micro * sequence
    under_way = min(layout.pp - stage, layout.micro_batches)  # of 1F1B
    if layout.chunks > 1:
        under_way += (layout.pp - 1) / layout.chunks
    kept = blocks * under_way * bytes_per_token(shape, element, layout.checkpointing, layout.tp)
    if layout.checkpointing:  # and the block whose forward is done again
        kept += bytes_per_token(shape, element, tp=layout.tp)
    logits = logits_bytes(shape, tokens, layout.tp) if stage == layout.pp - 1 else 0.0
    states = _states(shape, layout, parameters_of_rank(shape, layout, stage), precision, optimizer)
    return RankMemory(**vars(states), activations=tokens * kept, logits=logits)


def _states(shape: ModelShape, layout: Layout, parameters: int, precision: Precision, optimizer: str) -> ModelStates:
    """ZeRO's formula. Two blocks are whole at once under ZeRO-3; gradients that accumulate are whole under ZeRO-2."""
    gathered = 2 * math.ceil(shape.block / layout.tp) if layout.stage == "ZeRO-3" and layout.dp > 1 else 0
    states = model_states(parameters, layout.dp, layout.stage, optimizer, precision, gathered)
    if layout.stage == "ZeRO-2" and layout.micro_batches > 1:
        return ModelStates(**{**vars(states), "gradients": float(precision.gradients * parameters)})
    return states
