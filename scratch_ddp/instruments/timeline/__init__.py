"""Where the time of a step goes, on every rank: timelines of computing and communication, from real events."""

from scratch_ddp.profiling.intervals import exposed_seconds
from scratch_ddp.profiling.recording import timeline
from scratch_ddp.profiling.timeline import Span, Timeline
from scratch_ddp.profiling.trace import write_trace

__all__ = ["Span", "Timeline", "exposed_seconds", "timeline", "write_trace"]
