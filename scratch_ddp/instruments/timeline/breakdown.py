"""Where a step's time went, on each rank: parts that follow one another and add up to the step.

A rank that has called a collective either waits for the last rank to call it, too, or the data is on its way. Only the
records of all ranks, which share a clock, can tell: data can't be on its way before the last rank has called.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from scratch_ddp.instruments.intervals import Interval, total_seconds, union, without
from scratch_ddp.instruments.timeline.spans import COMPUTING, Span, Timeline

WAITING, TRANSFER, IDLE = "waiting", "transfer", "idle"
PARTS = (*COMPUTING, WAITING, TRANSFER, IDLE)
_MESSAGES = ("send", "recv", "SendRecv")  # between two ranks; the last is in the name of NCCL's kernel


@dataclass(frozen=True)
class Breakdown:
    """A step of one rank, in parts that don't overlap: by name from PARTS, when it took place, in seconds.

    "forward", "backward", "optimizer", "other" and "data" (loading it): this rank was busy, whatever was on the wire.
    Of the rest: "waiting", for a rank that had not called the same collective yet; "transfer", when all had; "idle".
    """

    rank: int
    start: float
    end: float
    parts: dict[str, list[Interval]]

    @property
    def step(self) -> float:
        """Seconds of the whole step: the sum of the parts."""
        return self.end - self.start

    def seconds(self, *names: str) -> float:
        """Seconds of these parts; without names, of all."""
        return sum(total_seconds(self.parts[name]) for name in names or PARTS)


def breakdown(timelines: Sequence[Timeline]) -> list[Breakdown]:
    """Divide what each rank recorded in one block of `timeline()`; by rank, as `over_ranks()` returns it.

    Raises ValueError if the ranks did not make the same collectives.
    """
    return _divided(timelines, [(each.start, each.end) for each in timelines])


def breakdown_of_steps(timelines: Sequence[Timeline]) -> list[list[Breakdown]]:
    """Divide each step that was marked by `with recorded.step():`. A list per step; in it, by rank.

    Raises ValueError as `breakdown`, and if no step is marked or the ranks marked different numbers of steps.
    """
    counts = [len(each.steps) for each in timelines]
    if not all(counts) or len(set(counts)) > 1:
        raise ValueError(f"put each step into a block `with recorded.step():`; steps that the ranks recorded: {counts}")
    return [_divided(timelines, steps) for steps in zip(*(each.steps for each in timelines), strict=True)]


def collectives(timelines: Sequence[Timeline]) -> list[list[tuple[Span, float]]]:
    """Each rank's collectives, in order, with the time at which the last of all ranks called the same one.

    Raises ValueError if the ranks recorded different collectives. Messages between two ranks are left out.
    """
    spans = [[span for span in each.communication if not _is_message(span)] for each in timelines]
    if any([span.name for span in mine] != [span.name for span in spans[0]] for mine in spans):
        counts = [len(mine) for mine in spans]
        raise ValueError(f"the ranks recorded different collectives ({counts}): record calls of one group")
    ready = [max(span.called for span in same) for same in zip(*spans, strict=True)]
    return [list(zip(mine, ready, strict=True)) for mine in spans]


def as_table(parts: Sequence[Breakdown]) -> str:
    """The parts in milliseconds, a line per rank, as text. Parts that no rank has are left out."""
    names = [name for name in PARTS if any(each.seconds(name) >= 5e-5 for each in parts)]
    lines = [f"{'rank':>4}  " + "  ".join(f"{name:>9}" for name in [*names, "step"])]
    for each in parts:
        figures = [each.seconds(name) for name in names] + [each.step]
        lines.append(f"{each.rank:>4}  " + "  ".join(f"{1e3 * seconds:9.1f}" for seconds in figures))
    return "\n".join(lines)


def _is_message(span: Span) -> bool:
    return any(name in span.name for name in _MESSAGES)


def _divided(timelines: Sequence[Timeline], steps: Sequence[Interval]) -> list[Breakdown]:
    """The step of each rank: one part after the other gets what is left of it."""
    found = []
    for timeline, calls, step in zip(timelines, collectives(timelines), steps, strict=True):
        pending = calls + [(span, span.start) for span in timeline.communication if _is_message(span)]
        candidates = [
            *((name, [span.interval for span in timeline.compute if span.name == name]) for name in COMPUTING),
            (TRANSFER, [(max(span.called, ready), span.end) for span, ready in pending if span.end > ready]),
            (WAITING, [(span.called, ready) for span, ready in pending if ready > span.called]),
            (TRANSFER, [span.interval for span in timeline.waits]),  # beyond a transfer's end: until the rank woke up
        ]
        left, parts = [step], {name: [] for name in PARTS}
        for name, intervals in candidates:
            remaining = without(left, intervals)
            parts[name] = union([*parts[name], *without(left, remaining)])
            left = remaining
        found.append(Breakdown(timeline.rank, *step, parts | {IDLE: left}))
    return found
