"""One trace of all ranks in Chrome's format, for ui.perfetto.dev and chrome://tracing.

The format: "Trace Event Format", Google 2016. A rank is a process; computing, operations, waiting and communication
are its threads. Times are microseconds from the beginning of the earliest rank.
"""

import gzip
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scratch_ddp.profiling.timeline import Span, Timeline

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
