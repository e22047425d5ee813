"""`plan`: the quickest layouts of a model on a cluster, and why the others fail. It tries all of them."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from scratch_ddp.instruments.cost.layouts.clusters import Cluster
from scratch_ddp.instruments.cost.layouts.forecast import EFFICIENCY, StepTime, step_time
from scratch_ddp.instruments.cost.layouts.layout import Layout, RankMemory, rank_memory
from scratch_ddp.instruments.cost.memory import STAGES
from scratch_ddp.instruments.cost.transformer.activations import refuse_mixture
from scratch_ddp.instruments.cost.transformer.shape import ModelShape

USABLE = 0.9  # of the memory: the rest is for what the formulas leave out
_CHUNKS = (1, 2, 4)


@dataclass(frozen=True)
class Candidate:
    """A layout that fits, with its memory and time."""

    layout: Layout
    memory: RankMemory
    time: StepTime


@dataclass
class Plan:
    """The best layout of each (dp, tp, pp) that fits, the quickest first, and what became of the others.

    refused: how many layouts were not possible, by the reason · closest: the layout with least bytes of those too large
    """

    shape: ModelShape
    cluster: Cluster
    devices: int
    batch: int
    sequence: int
    efficiency: float
    usable: float
    best: list[Candidate] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    closest: tuple[Layout, RankMemory] | None = None

    @property
    def room(self) -> float:
        """Bytes of a device that may be used."""
        return self.cluster.device.memory * self.usable

    def table(self, most: int = 5) -> str:
        """The first `most` layouts with milliseconds, gigabytes and what binds; then why others are not there."""
        lines = [f"{'dp':>5}{'tp':>4}{'pp':>4}  {'sharding':9}{'micro-batches':14}{'keeps':8}{'GB':>7}{'ms':>9}  binds"]
        for found in self.best[:most]:
            each, time = found.layout, found.time
            cut = f"{each.micro_batches} × {each.micro}" + (f" / {each.chunks}" if each.chunks > 1 else "")
            keeps = "inputs" if each.checkpointing else "all"
            share = 100 * getattr(time, time.binds) / time.total
            split = f"{each.dp:5}{each.tp:4}{each.pp:4}  {each.stage if each.dp > 1 else '–':9}{cut:14}{keeps:8}"
            took = f"{found.memory.total / 1e9:7.1f}{1e3 * time.total:9.0f}"
            lines.append(f"{split}{took}  {time.binds} ({share:.0f} %)")
        if not self.best:
            lines = [self.why_none()]
        return "\n".join(lines + [f"{number:6,} layouts: {reason}" for reason, number in self.refused.most_common()])

    def why_none(self) -> str:
        """A sentence on why no layout fits, and by how much."""
        if self.closest is None:
            return f"No layout of {self.devices} devices divides {self.batch} sequences and {self.shape.blocks} blocks."
        layout, memory = self.closest
        return (
            f"{self.shape.name} fits into no layout of {self.devices} {self.cluster.device.name}: the least is "
            f"{memory.total / 1e9:.1f} GB on a device ({layout}), {(memory.total - self.room) / 1e9:.1f} GB more than "
            f"the {self.room / 1e9:.1f} GB that may be used."
        )


def layouts(shape: ModelShape, cluster: Cluster, devices: int, batch: int) -> Iterator[Layout | str]:
    """Every layout of so many devices with a global batch of so many sequences; for one that can't be, why.

    tp divides the heads, or the MLP's width where there are none, and stays in a node; pp is at most the number of
    blocks; a micro-batch has 1, 2, 4, … sequences.
    """
    for tp in _divisors(devices):
        if tp > cluster.per_node or (shape.heads or shape.inner) % tp:
            yield "tp is more than a node has, or doesn't divide the heads"
            continue
        for pp in _divisors(devices // tp):
            dp = devices // tp // pp
            if pp > shape.blocks:
                yield "more stages than blocks"
            elif batch % dp:
                yield "dp does not divide the batch"
            else:
                yield from _ways(dp, tp, pp, batch // dp, shape.blocks)


def _ways(dp: int, tp: int, pp: int, sequences: int, blocks: int) -> Iterator[Layout]:
    """How a replica takes its sequences, and what it shards and keeps."""
    micro = 1
    while sequences % micro == 0:
        m = sequences // micro
        for chunks in _CHUNKS:
            if chunks > 1 and (pp == 1 or m % pp or pp * chunks > blocks):
                continue
            for stage in STAGES if dp > 1 else STAGES[:1]:
                if stage == "ZeRO-3" and pp > 1:
                    continue
                for checkpointing in (False, True):
                    yield Layout(dp, tp, pp, micro, m, stage, checkpointing, chunks)
        micro *= 2


def plan(
    shape: ModelShape,
    cluster: Cluster,
    devices: int,
    batch: int,
    sequence: int,
    efficiency: float = EFFICIENCY,
    usable: float = USABLE,
) -> Plan:
    """Try every layout of `devices` devices for steps of `batch` sequences of `sequence` tokens.

    Raises ValueError, in a sentence, for a mixture of experts, no devices, a batch or a sequence below 1, and a
    `usable` share of the memory that is not above 0 and at most 1. A model that fits nowhere gives a plan without
    layouts, which says by how much it is too large.
    """
    refuse_mixture(shape, "layouts")
    for name, value in (("devices", devices), ("batch", batch), ("sequence", sequence)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a whole number, 1 or more, not {value!r}")
    if not 0 < usable <= 1:
        raise ValueError(f"usable must be above 0 and at most 1, not {usable!r}")
    found = Plan(shape, cluster, devices, batch, sequence, efficiency, usable)
    quickest: dict[tuple[int, int, int], Candidate] = {}
    for layout in layouts(shape, cluster, devices, batch):
        if isinstance(layout, str):
            found.refused[layout] += 1
            continue
        memory = rank_memory(shape, layout, sequence)
        if memory.total > found.room:
            found.refused["too large for the memory"] += 1
            if found.closest is None or memory.total < found.closest[1].total:
                found.closest = layout, memory
            continue
        candidate = Candidate(layout, memory, step_time(shape, layout, cluster, sequence, efficiency))
        split = layout.dp, layout.tp, layout.pp
        if split not in quickest or _order(candidate) < _order(quickest[split]):
            quickest[split] = candidate
    found.best = sorted(quickest.values(), key=_order)
    return found


def _order(candidate: Candidate) -> tuple[float, float]:
    return candidate.time.total, candidate.memory.total


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]
