"""Clusters and layouts: how a model's training is spread over devices, and what one of its ranks holds."""

import math
from dataclasses import dataclass, fields

from scratch_ddp.instruments.cost.models import ModelShape, bytes_per_token, logits_bytes
from scratch_ddp.instruments.cost.states import MIXED, STAGES, ModelStates, Precision, model_states
from scratch_ddp.instruments.cost.wire import CALL, NETWORK, PCIE, PRESETS, Link, Wire, by_bandwidth

_GB, _GIB = 1e9, 2**30


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

    Where devices share network cards, `between` is a device's share of them.
    """

    name: str
    device: Accelerator
    per_node: int
    inside: Link
    between: Link
    source: str

    def wire(self, ranks: int, apart: int = 1) -> Wire:
        """What connects a group of `ranks` devices, each `apart` from the next.

        It leaves a node on the network ports of all its devices there, while groups like it take the others.
        """
        return Wire(self.inside, self.between, ranks, max(1, self.per_node // apart), trees=True)


A100 = Accelerator("A100", 312e12, 80 * _GB, 1.5, "NVIDIA A100 data sheet: 312 TFLOP/s in BF16 without sparsity, 80 GB")
H100 = Accelerator(
    "H100", 989e12, 80 * _GB, 2.5, "NVIDIA H100 SXM data sheet: 1,979 TFLOP/s with sparsity, half without"
)
H200 = Accelerator("H200", 989e12, 141 * _GB, 3.5, "NVIDIA H200 SXM data sheet: as the H100, with 141 GB")
V5P = Accelerator("TPU v5p", 459e12, 95 * _GIB, 4.2, "Google Cloud, TPU v5p: 459 TFLOP/s in BF16, 95 GiB")
T4 = Accelerator("T4", 65e12, 16 * _GB, 0.35, "NVIDIA T4 data sheet: 65 TFLOP/s in FP16, 16 GB")

_SUPERPOD = "NVIDIA DGX SuperPOD: eight devices over NVLink, a port of {} Gb/s for each"
_POD = """J. Austin et al., "How to Scale Your Model", 2025: 8960 chips, 90 GB/s a link each way, so 180 on a ring, and
three rings; Google Cloud: 50 Gb/s to other pods; a hop of about 1 µs is a guess"""
_NVLINK_4, _NDR = PRESETS["NVLink 4"], PRESETS["InfiniBand NDR"]
_CLUSTERS = [
    Cluster("A100 HDR", A100, 8, PRESETS["NVLink 3"], PRESETS["InfiniBand HDR"], _SUPERPOD.format(200)),
    Cluster("H100", H100, 8, _NVLINK_4, _NDR, _SUPERPOD.format(400)),
    Cluster("H200", H200, 8, _NVLINK_4, _NDR, _SUPERPOD.format(400)),
    Cluster(
        "TPU v5p",
        V5P,
        8960,
        Link(CALL, 1 / (180 * _GB), "ICI", _POD, 1e-6),
        by_bandwidth("Google's network", 6.25, NETWORK, _POD),
        _POD,
    ),
    Cluster(
        "T4",
        T4,
        4,
        by_bandwidth("PCIe of T4", 1e-9 / PRESETS["T4 over PCIe"].beta, PCIE, "as measured, see 'T4 over PCIe'"),
        by_bandwidth("a quarter of 50 Gb/s", 50 / 8 / 4, NETWORK, "AWS g4dn.12xlarge"),
        "AWS g4dn.12xlarge: four T4, Ethernet of 50 Gb/s for all of them",
    ),
]
CLUSTERS: dict[str, Cluster] = {cluster.name: cluster for cluster in _CLUSTERS}


def cluster(name: str) -> Cluster:
    """Return the cluster of that name, in capitals or not. Raises ValueError, listing all, if there is none."""
    for known, found in CLUSTERS.items():
        if known.lower() == name.lower():
            return found
    raise ValueError(f"there is no cluster of {name!r}; there are {', '.join(CLUSTERS)}")


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
        for name in ("dp", "tp", "pp", "micro", "micro_batches", "chunks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be a whole number, 1 or more, not {getattr(self, name)!r}")
        if self.stage not in STAGES:
            raise ValueError(f"stage: {self.stage!r}; allowed are {', '.join(STAGES)}")
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
    matrices = blocks * (shape.block - shape.norms) + (shape.embedding + shape.beside) * first + head
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
    `element`: bytes of a number in activations. Raises ValueError for a mixture of experts.
    """
    stages = sorted({0, min(1, layout.pp - 1), layout.pp - 1})  # of those in the middle the second holds most
    return max(
        (_stage_memory(shape, layout, each, sequence, precision, optimizer, element) for each in stages),
        key=lambda memory: memory.total,
    )


def _stage_memory(
    shape: ModelShape, layout: Layout, stage: int, sequence: int, precision: Precision, optimizer: str, element: int
) -> RankMemory:
    blocks, tokens = blocks_of_stages(shape.blocks, layout.pp)[stage], layout.micro * sequence
    p, v = layout.pp, layout.chunks
    warm_up = p - stage if v == 1 else ((v - 1) * p + 2 * (p - stage) - 1) / v  # 1F1B, interleaved
    kept = blocks * min(warm_up, layout.micro_batches)
    kept *= bytes_per_token(shape, element, layout.checkpointing, layout.tp)
    if layout.checkpointing:  # and the block whose forward is done again
        kept += bytes_per_token(shape, element, tp=layout.tp)
    logits = logits_bytes(shape, tokens, element, layout.tp) if stage == p - 1 else 0.0
    states = _states(shape, layout, parameters_of_rank(shape, layout, stage), precision, optimizer)
    return RankMemory(**vars(states), activations=tokens * kept, logits=logits)


def _states(shape: ModelShape, layout: Layout, parameters: int, precision: Precision, optimizer: str) -> ModelStates:
    """ZeRO's formula. Two blocks are whole at once under ZeRO-3."""
    gathered = 2 * math.ceil(shape.block / layout.tp) if layout.stage == "ZeRO-3" and layout.dp > 1 else 0
    return model_states(parameters, layout.shards or layout.dp, layout.stage, optimizer, precision, gathered)
