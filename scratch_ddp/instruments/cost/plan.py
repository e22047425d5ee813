"""`plan`: the quickest layouts of a model on a cluster, and why the others fail; `what_binds`: what sets the pace.

Source of the bounds: J. Austin et al., "How to Scale Your Model", 2025, part 5.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product

from scratch_ddp.instruments.cost.layouts import EFFICIENCIES, Layout, StepTime, rank_memory, step_time
from scratch_ddp.instruments.cost.models import ModelShape
from scratch_ddp.instruments.cost.states import MIXED, STAGES, Precision, RankMemory
from scratch_ddp.instruments.cost.wire import Cluster, Wire

_USABLE = 0.9  # of the memory: the rest is for what the formulas leave out
BOUNDS = ("compute", "FSDP's messages", "tensor parallel's messages", "memory", "too few sequences")
_CHUNKS = (1, 2, 4, 8)
_KEPT = (False, "selective", "half", True)  # of a block, from all to its input alone
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

    refused: numbers of layouts by the reason · too_large: if none fits, by how much the smallest is too large
    """

    best: list[Candidate] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    too_large: str = ""

    def table(self, most: int = 5) -> str:
        """The first `most` layouts with milliseconds, gigabytes and what binds; then why others are not there."""
        lines = ["   dp  tp  pp  sharding micro-batches keeps        GB             ms  binds"]
        for found in self.best[:most]:
            each, (binds, longest) = found.layout, max(vars(found.slow).items(), key=lambda part: part[1])
            cut = f"{each.micro_batches} × {each.micro}" + (f" / {each.chunks}" if each.chunks > 1 else "")
            keeps = {False: "all", True: "inputs"}.get(each.checkpointing, each.checkpointing)
            took = f"{1e3 * found.time.total:,.0f}–{1e3 * found.slow.total:,.0f}"
            split = f"{each.dp:5}{each.tp:4}{each.pp:4}  {each.sharding:9}{cut:14}{keeps:10}"
            share = f"{100 * longest / found.slow.total:.0f} %"
            lines.append(f"{split}{found.memory.total / 1e9:5.1f}{took:>15}  {binds} ({share})")
        lines = [self.too_large] if self.too_large else lines
        return "\n".join(lines + [f"{number:6,} layouts: {reason}" for reason, number in self.refused.most_common()])


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
                yield from _ways(dp, tp, pp, batch // dp, shape.blocks, cluster.per_node // tp)


def _ways(dp: int, tp: int, pp: int, sequences: int, blocks: int, in_node: int) -> Iterator[Layout]:
    """How a replica takes its sequences, and what it shards and keeps. Embedding and head may be a chunk each."""
    stages = [(stage, 0) for stage in (STAGES if dp > 1 else STAGES[:1]) if pp == 1 or stage != "ZeRO-3"]
    if pp == 1 and 1 < in_node < dp and dp % in_node == 0:
        stages.append(("ZeRO-3", in_node))  # HSDP
    micros = [2**k for k in range(1 + sequences.bit_length()) if sequences % 2**k == 0]
    for micro, chunks, (stage, shards), checkpointing in product(micros, _CHUNKS, stages, _KEPT):
        m = sequences // micro
        if chunks == 1 or (pp > 1 and m % pp == 0 and pp * chunks <= blocks + 2):
            yield Layout(dp, tp, pp, micro, m, stage, checkpointing, chunks, shards)


def plan(
    shape: ModelShape, cluster: Cluster, devices: int, batch: int, sequence: int, precision: Precision = MIXED
) -> Plan:
    """Try every layout of `devices` devices for steps of `batch` sequences of `sequence` tokens.

    A model that fits nowhere gives a plan without layouts, which says by how much it is too large. Raises ValueError
    for a mixture of experts.
    """
    found, room = Plan(), _USABLE * cluster.device.memory
    fitting: dict[tuple[int, int, int], list[Candidate]] = {}
    too_large: list[tuple[float, Layout]] = []
    for layout in layouts(shape, cluster, devices, batch):
        if isinstance(layout, str):
            found.refused[layout] += 1
            continue
        memory = rank_memory(shape, layout, sequence, precision)
        if memory.total > room:
            found.refused["too large for the memory"] += 1
            too_large.append((memory.total, layout))
            continue
        slow, quick = (step_time(shape, layout, cluster, sequence, each, precision) for each in EFFICIENCIES)
        fitting.setdefault((layout.dp, layout.tp, layout.pp), []).append(Candidate(layout, memory, quick, slow))
    for each in fitting.values():
        longest = _TIED * min(candidate.seconds for candidate in each)
        tied = [candidate for candidate in each if candidate.seconds <= longest]
        found.best.append(min(tied, key=lambda candidate: candidate.memory.total))
    found.best.sort(key=lambda candidate: candidate.seconds)
    if too_large and not fitting:
        (least, layout), all_of_them = min(too_large, key=lambda each: each[0]), f"{devices} {cluster.device.name}"
        found.too_large = (
            f"{shape.name} fits into no layout of {all_of_them}: the least is {least / 1e9:.1f} GB on a device "
            f"({layout}), {(least - room) / 1e9:.1f} GB more than the {room / 1e9:.1f} GB that may be used."
        )
    return found


def tokens_to_be_compute_bound(flops: float, wire: Wire, weights: float, tp: int = 1, element: int = 2) -> int:
    """The least tokens of a replica of `tp` devices with which a block computes while the next one is gathered.

    In forward: 2 operations for each weight and token, and `element` bytes for each weight.
    """
    return math.ceil(wire.all_gather(element * weights / tp) * flops * tp / (2 * weights))


def what_binds(
    shape: ModelShape, cluster: Cluster, devices: int, batch: int, sequence: int, tp: int, checkpointing: bool
) -> str:
    """Which of BOUNDS sets the pace under ZeRO-3, where a replica takes as many of its sequences at once as fit.

    `devices` compute at their peak; `batch`: sequences in a step; `sequence`: tokens; `tp`: at most all devices count.
    """
    tp = min(tp, devices)
    replicas, room = devices // tp, _USABLE * cluster.device.memory
    if batch < replicas:
        return "too few sequences"
    layout = Layout(replicas, tp, stage="ZeRO-3" if replicas > 1 else "DDP", checkpointing=checkpointing)
    one = rank_memory(shape, layout, sequence)
    if one.total > room:
        return "memory"
    more = int((room - one.total) / (one.activations + one.logits))  # sequences
    step = step_time(shape, replace(layout, micro=min(batch // replicas, 1 + more)), cluster, sequence, efficiency=1.0)
    messages = 3 * shape.blocks * cluster.wire(replicas, tp).all_gather(2 * shape.block / tp)
    if messages > step.compute + step.tensor:
        return "FSDP's messages"
    return "tensor parallel's messages" if step.tensor > step.compute else "compute"
