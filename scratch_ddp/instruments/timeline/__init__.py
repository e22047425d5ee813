"""Where the time of a step goes, on every rank: timelines of computing and communication, from real events."""

from scratch_ddp.instruments.timeline.record import timeline
from scratch_ddp.instruments.timeline.spans import Span, Timeline, exposed_seconds, write_trace

__all__ = ["Span", "Timeline", "exposed_seconds", "timeline", "write_trace"]
