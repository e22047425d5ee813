"""Timelines: when each rank computed, waited and communicated during a step, from recorded events.

`with timeline(group) as recorded:` records this rank by torch's profiler; on a simulated link, communication is what
the link carried. A `Timeline` measures what communication was exposed, gathers the timelines of all ranks, and writes
one trace of them for ui.perfetto.dev.
"""

from scratch_ddp.instruments.intervals import exposed_seconds
from scratch_ddp.instruments.timeline.record import timeline
from scratch_ddp.instruments.timeline.spans import Span, Timeline, write_trace

__all__ = ["Span", "Timeline", "exposed_seconds", "timeline", "write_trace"]
