"""What a rank did when: its computing, its waiting and its communication, and the same of all ranks side by side."""

import dataclasses
import gzip
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from scratch_ddp.common.accounting import set_up
from scratch_ddp.common.agreement import raise_everywhere

# FOLDED: Stretches of time as (start, end) pairs: put together, cut out of one another, measured.

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the same stretches in ascending order, those that touch or overlap as one."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def without(intervals: Iterable[Interval], removed: Iterable[Interval]) -> list[Interval]:
    """Return what is left of `intervals` outside of `removed`, in ascending order."""
    holes = union(removed)
    left = []
    for start, end in union(intervals):
        for hole_start, hole_end in holes:
            if hole_start >= end:
                break
            if hole_start > start:
                left.append((start, hole_start))
            start = max(start, hole_end)
        if start < end:
            left.append((start, end))
    return left


def seconds(intervals: Iterable[Interval]) -> float:
    """How long the stretches are together; what overlaps counts once."""
    return sum(end - start for start, end in union(intervals))


def exposed_seconds(compute: Iterable[Interval], communication: Iterable[Interval]) -> float:
    """Seconds in which something is on the wire and this rank does not compute: communication that nothing hides."""
    return seconds(without(communication, compute))


# FOLDED: One trace of all ranks in Chrome's format, for ui.perfetto.dev and chrome://tracing.
#
# The format: "Trace Event Format", Google 2016. A rank is a process; computing, operations, waiting and communication
# are its threads. Times are microseconds from the beginning of the earliest rank.

_PHASES, _OPERATIONS, _WAITS, _COMMUNICATION = 1, 2, 3, 4  # the threads of a rank; more of the last where it overlaps


def write_trace(timelines: Sequence["Timeline"], path: str | Path) -> None:
    """Write the trace; packed if `path` ends in ".gz". Raises OSError if it can't."""
    zero = min(each.start for each in timelines)
    events = [event for each in timelines for event in _events_of(each, zero)]
    text = json.dumps({"displayTimeUnit": "ms", "traceEvents": events})
    path = Path(path)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())


def _events_of(timeline: "Timeline", zero: float) -> Iterator[dict[str, Any]]:
    rank = timeline.rank
    yield _label(rank, 0, "process_name", name=f"rank {rank}")
    yield _label(rank, 0, "process_sort_index", sort_index=rank)
    threads = [
        (_PHASES, "compute", timeline.compute),
        (_OPERATIONS, "operations", timeline.operations),
        (_WAITS, "waiting", timeline.waits),
    ]
    for number, lane in enumerate(lanes(timeline.communication)):
        threads.append(
            (_COMMUNICATION + number, "communication" if not number else f"communication {number + 1}", lane)
        )
    for thread, name, spans in threads:
        yield _label(rank, thread, "thread_name", name=name)
        yield _label(rank, thread, "thread_sort_index", sort_index=thread)
        for span in spans:
            yield from _slice(rank, thread, span, zero)


def lanes(spans: Iterable["Span"]) -> list[list["Span"]]:
    """Share spans among as few rows as they need in order not to overlap; at least one row."""
    rows: list[list[Span]] = [[]]
    for span in sorted(spans, key=lambda each: each.start):
        free = next((row for row in rows if not row or row[-1].end <= span.start), None)
        if free is None:
            rows.append(free := [])
        free.append(span)
    return rows


def _label(rank: int, thread: int, what: str, **content: Any) -> dict[str, Any]:
    return {"ph": "M", "pid": rank, "tid": thread, "name": what, "args": content}


def _slice(rank: int, thread: int, span: "Span", zero: float) -> Iterator[dict[str, Any]]:
    def microseconds(moment: float) -> float:
        return round((moment - zero) * 1e6, 3)

    start = microseconds(span.start)
    content: dict[str, Any] = {"bytes": span.nbytes} if thread >= _COMMUNICATION else {}
    if span.posted is not None:
        content["queued for (ms)"] = round((span.start - span.posted) * 1e3, 3)
        arrow = {"name": "posted", "cat": "link", "id": f"{rank}.{start}"}
        yield {"ph": "s", "pid": rank, "tid": _PHASES, "ts": microseconds(span.posted), **arrow}
        yield {"ph": "f", "bp": "e", "pid": rank, "tid": thread, "ts": start, **arrow}
    duration = round(microseconds(span.end) - start, 3)
    yield {"ph": "X", "pid": rank, "tid": thread, "name": span.name, "ts": start, "dur": duration, "args": content}


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
