"""`plan`: the quickest layouts of a model on a cluster, and why the others fail; `what_binds`: what sets the pace.

With t tokens a device does 2 P t operations in forward for a block of P weights, of which it gathers 2 P bytes under
ZeRO-3. So what counts is how many operations it does while one byte travels. The backward does twice of both. Source:
J. Austin et al., "How to Scale Your Model", 2025, part 5.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product

from scratch_ddp.instruments.cost.layouts import EFFICIENCIES, Layout, StepTime, rank_memory, step_time
from scratch_ddp.instruments.cost.models import ModelShape
from scratch_ddp.instruments.cost.states import MIXED, STAGES, Precision, RankMemory
from scratch_ddp.instruments.cost.wire import Cluster, Wire

_USABLE = 0.9  # of the memory: the rest is for what the formulas leave out
BOUNDS = ("compute", "FSDP's messages", "tensor parallel's messages", "memory", "too few sequences")
_CHUNKS = (1, 2, 4, 8)
_TIED = 1.01  # a step that is longer by no more than that is as good: then less memory is better


@dataclass(frozen=True)
class Candidate:
    """A layout that fits, with its memory, and its time with the better efficiency and the worse one."""

    layout: Layout
    memory: RankMemory
    time: StepTime
    slow: StepTime

    @property
    def seconds(self) -> float:
        """The mean of both times, by which layouts are compared."""
        return (self.time.total + self.slow.total) / 2


@dataclass
class Plan:
    """The best layout of each (dp, tp, pp) that fits, the quickest first, and what became of the others.

    devices: such as "16 H100" · room: bytes of a device that may be used · refused: numbers of layouts by the reason ·
    closest: the layout with least bytes of those too large
    """

    shape: ModelShape
    devices: str
    room: float
    best: list[Candidate] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    closest: tuple[Layout, RankMemory] | None = None

    def table(self, most: int = 5) -> str:
        """The first `most` layouts with milliseconds, gigabytes and what binds; then why others are not there."""
        lines = [
            f"{'dp':>5}{'tp':>4}{'pp':>4}  {'sharding':9}{'micro-batches':14}{'keeps':10}{'GB':>5}{'ms':>15}  binds"
        ]
        for found in self.best[:most]:
            each, time = found.layout, found.slow
            cut = f"{each.micro_batches} × {each.micro}" + (f" / {each.chunks}" if each.chunks > 1 else "")
            keeps = {False: "all", True: "inputs"}.get(each.checkpointing, each.checkpointing)
            share = 100 * getattr(time, time.binds) / time.total
            took = f"{1e3 * found.time.total:,.0f}–{1e3 * found.slow.total:,.0f}"
            split = f"{each.dp:5}{each.tp:4}{each.pp:4}  {each.sharding:9}{cut:14}{keeps:10}"
            lines.append(f"{split}{found.memory.total / 1e9:5.1f}{took:>15}  {time.binds} ({share:.0f} %)")
        lines = lines if self.best else [self._why_none()]
        return "\n".join(lines + [f"{number:6,} layouts: {reason}" for reason, number in self.refused.most_common()])

    def _why_none(self) -> str:
        """A sentence on why no layout fits, and by how much."""
        if self.closest is None:
            return f"No layout of {self.devices} divides the batch and {self.shape.blocks} blocks."
        layout, memory = self.closest
        more = (memory.total - self.room) / 1e9
        return (
            f"{self.shape.name} fits into no layout of {self.devices}: the least is {memory.total / 1e9:.1f} GB on a "
            f"device ({layout}), {more:.1f} GB more than the {self.room / 1e9:.1f} GB that may be used."
        )


def layouts(shape: ModelShape, cluster: Cluster, devices: int, batch: int) -> Iterator[Layout | str]:
    """Every layout for a step of so many sequences (1, 2, 4, … in a micro-batch); for one that can't be, why."""
    divisors = [each for each in range(1, devices + 1) if devices % each == 0]
    for tp in divisors:
        if cluster.per_node % tp or (shape.kv_heads or shape.inner) % tp:
            yield "tp doesn't divide a node, or the heads of keys and values"
            continue
        for pp in (each for each in divisors if devices // tp % each == 0):
            dp = devices // tp // pp
            if pp > shape.blocks:
                yield "more stages than blocks"
            elif batch % dp:
                yield "dp does not divide the batch"
            else:
                yield from _ways(dp, tp, pp, batch // dp, shape.blocks, cluster.per_node)


def _ways(dp: int, tp: int, pp: int, sequences: int, blocks: int, per_node: int) -> Iterator[Layout]:
    """How a replica takes its sequences, and what it shards and keeps. Embedding and head may be a chunk each."""
    stages = [(stage, 0) for stage in (STAGES if dp > 1 else STAGES[:1]) if pp == 1 or stage != "ZeRO-3"]
    in_node = per_node // tp
    if pp == 1 and 1 < in_node < dp and dp % in_node == 0:
        stages.append(("ZeRO-3", in_node))  # HSDP
    micro = 1
    while sequences % micro == 0:
        m = sequences // micro
        for chunks, (stage, shards), checkpointing in product(_CHUNKS, stages, (False, "selective", True)):
            if chunks == 1 or (pp > 1 and m % pp == 0 and pp * chunks <= blocks + 2):
                yield Layout(dp, tp, pp, micro, m, stage, checkpointing, chunks, shards)
        micro *= 2


def plan(
    shape: ModelShape,
    cluster: Cluster,
    devices: int,
    batch: int,
    sequence: int,
    efficiencies: tuple[float, float] = EFFICIENCIES,
    precision: Precision = MIXED,
) -> Plan:
    """Try every layout of `devices` devices for steps of `batch` sequences of `sequence` tokens.

    `efficiencies`: the least and the greatest share of the peak that a device may reach while it computes. A model that
    fits nowhere gives a plan without layouts, which says by how much it is too large. Raises ValueError for a mixture
    of experts, for numbers below 1, and for shares that can't be.
    """
    if min(devices, batch, sequence) < 1:
        raise ValueError(f"devices, sequences and tokens are 1 or more each, not {devices}, {batch}, {sequence}")
    worst, best = sorted(efficiencies)
    if not 0 < worst <= best <= 1:
        raise ValueError(f"an efficiency is above 0 and at most 1, not {worst} or {best}")
    found = Plan(shape, f"{devices} {cluster.device.name}", cluster.device.memory * _USABLE)
    fitting: dict[tuple[int, int, int], list[Candidate]] = {}
    for layout in layouts(shape, cluster, devices, batch):
        if isinstance(layout, str):
            found.refused[layout] += 1
            continue
        memory = rank_memory(shape, layout, sequence, precision)
        if memory.total > found.room:
            found.refused["too large for the memory"] += 1
            if found.closest is None or memory.total < found.closest[1].total:
                found.closest = layout, memory
            continue
        slow, quick = (step_time(shape, layout, cluster, sequence, each, precision) for each in (worst, best))
        fitting.setdefault((layout.dp, layout.tp, layout.pp), []).append(Candidate(layout, memory, quick, slow))
    found.best = _in_order([_in_order(each)[0] for each in fitting.values()])
    return found


def _in_order(candidates: list[Candidate]) -> list[Candidate]:
    """The quickest first; of those that are almost as quick, the one that holds least."""
    left, ordered = sorted(candidates, key=lambda each: each.seconds), []
    while left:
        tied = [each for each in left if each.seconds <= _TIED * left[0].seconds]
        ordered.append(min(tied, key=lambda each: each.memory.total))
        left.remove(ordered[-1])
    return ordered


def tokens_to_be_compute_bound(flops: float, wire: Wire, weights: float, tp: int = 1, element: int = 2) -> int:
    """The least tokens of a replica of `tp` devices with which a block computes while the next one is gathered."""
    return math.ceil(wire.all_gather(element * weights / tp) * flops * tp / (2 * weights))


def what_binds(
    shape: ModelShape,
    cluster: Cluster,
    devices: int,  # that compute at their peak
    batch: int,  # sequences in a step
    sequence: int,  # tokens
    tp: int = 1,
    checkpointing: bool = False,
) -> str:
    """Which of BOUNDS sets the pace under ZeRO-3, where a replica takes as many of its sequences at once as fit."""
    replicas = devices // tp
    if batch < replicas:
        return "too few sequences"

    def layout(micro: int) -> Layout:
        return Layout(replicas, tp, 1, micro, 1, "ZeRO-3" if replicas > 1 else "DDP", checkpointing)

    one, two = (rank_memory(shape, layout(micro), sequence).total for micro in (1, 2))
    room = _USABLE * cluster.device.memory
    if one > room:
        return "memory"
    micro = min(batch // replicas, 1 + int((room - one) / (two - one)))
    step = step_time(shape, layout(micro), cluster, sequence, efficiency=1.0)
    messages = 3 * shape.blocks * cluster.wire(replicas, tp).all_gather(2 * shape.block / tp)
    if messages > step.compute + step.tensor:
        return "FSDP's messages"
    return "tensor parallel's messages" if step.tensor > step.compute else "compute"
