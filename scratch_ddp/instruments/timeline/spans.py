"""What a rank did when: its computing, its waiting and its communication, and the same of all ranks side by side."""

import dataclasses
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist

from scratch_ddp.agreement import raise_everywhere
from scratch_ddp.profiling.intervals import exposed_seconds, seconds
from scratch_ddp.profiling.trace import write_trace
from scratch_ddp.traffic import set_up

COMPUTING = ("forward", "backward", "optimizer", "other")


@dataclass(frozen=True)
class Span:
    """A stretch of time in seconds of time.monotonic, which the ranks of a machine share."""

    name: str  # "backward", "all_reduce", "aten::mm"
    start: float
    end: float
    nbytes: int = 0  # of communication: on the wire of a simulated link; of a real collective, of its tensors
    posted: float | None = None  # of communication: when it was asked for, if that is known


@dataclass
class Timeline:
    """One rank's; filled when the block of `timeline()` ends."""

    rank: int = 0
    start: float = 0.0  # of the block, in seconds of time.monotonic
    end: float = 0.0
    compute: list[Span] = field(default_factory=list)  # named after COMPUTING; waiting is not in it
    waits: list[Span] = field(default_factory=list)
    communication: list[Span] = field(default_factory=list)
    operations: list[Span] = field(default_factory=list)  # every operation of torch, for the trace

    def seconds(self, *names: str) -> float:
        """Seconds of computing; with names ("backward", "optimizer"), of that alone."""
        return seconds((span.start, span.end) for span in self.compute if not names or span.name in names)

    def communication_seconds(self) -> float:
        """Seconds in which something was on the wire."""
        return seconds((span.start, span.end) for span in self.communication)

    def exposed_seconds(self) -> float:
        """Seconds in which something was on the wire and this rank did not compute."""
        return exposed_seconds(
            [(span.start, span.end) for span in self.compute],
            [(span.start, span.end) for span in self.communication],
        )

    def over_ranks(self, group: dist.ProcessGroup | None = None) -> list["Timeline"]:
        """Return the timelines of all ranks, by rank. A collective: every rank of `group` (default: all) calls it.

        Ranks of one machine share a clock; those of others are placed by their wall clocks. Without a process group
        there is this rank's alone. Costs one all_gather_object, counted as set-up.
        """
        if not dist.is_initialized():
            return [self]
        clock = time.time() - time.monotonic()  # differs between machines, which started at different times
        reports: list[tuple[float, Timeline] | None] = [None] * dist.get_world_size(group)
        with set_up():
            dist.all_gather_object(reports, (clock, self), group=group)
        placed = [theirs if abs(at - clock) < 1 else theirs._later_by(at - clock) for at, theirs in reports]
        return list({theirs.rank: theirs for theirs in placed}.values())  # a rank without peers hears itself n times

    def save(self, path: str | Path, group: dist.ProcessGroup | None = None) -> None:
        """Write one trace of all ranks, which ui.perfetto.dev and chrome://tracing open; ".gz" at the end packs it.

        A collective, as `over_ranks`; the first rank writes. Raises OSError on every rank if it can't.
        """
        timelines = self.over_ranks(group)
        problem = None
        if self.rank == timelines[0].rank:
            try:
                write_trace(timelines, path)
            except OSError as error:
                problem = f"the trace could not be written: {error}"
        raise_everywhere(problem, group, OSError)

    def _later_by(self, late: float) -> "Timeline":
        def moved(span: Span) -> Span:
            posted = None if span.posted is None else span.posted + late
            return dataclasses.replace(span, start=span.start + late, end=span.end + late, posted=posted)

        lists = {name: [moved(span) for span in getattr(self, name)] for name in _LISTS}
        return dataclasses.replace(self, start=self.start + late, end=self.end + late, **lists)


_LISTS = ("compute", "waits", "communication", "operations")
