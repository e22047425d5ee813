"""Timelines: when each rank computed, waited and communicated during a step, from recorded events.

`with timeline(group) as recorded:` records this rank by torch's profiler; on a simulated link, communication is what
the link carried. A `Timeline` measures what communication was exposed, gathers the timelines of all ranks, and writes
one trace of them for ui.perfetto.dev. `breakdown` says of each rank where a step's time went, `by_operator` and
`by_call_site` where in the program.
"""

from scratch_ddp.instruments.intervals import exposed_seconds
from scratch_ddp.instruments.timeline.breakdown import (
    PARTS,
    Breakdown,
    as_table,
    breakdown,
    breakdown_of_steps,
    waited_for,
)
from scratch_ddp.instruments.timeline.hot_spots import by_call_site, by_operator
from scratch_ddp.instruments.timeline.record import timeline
from scratch_ddp.instruments.timeline.spans import Span, Timeline, write_trace

__all__ = [
    "PARTS",
    "Breakdown",
    "Span",
    "Timeline",
    "as_table",
    "breakdown",
    "breakdown_of_steps",
    "by_call_site",
    "by_operator",
    "exposed_seconds",
    "timeline",
    "waited_for",
    "write_trace",
]
