"""Timelines: when each rank computed, waited and communicated during a step, and where in the program."""

from scratch_ddp.instruments.timeline.breakdown import Breakdown, as_table, breakdown, breakdown_of_steps, by_call_site
from scratch_ddp.instruments.timeline.record import timeline
from scratch_ddp.instruments.timeline.spans import PARTS, Span, Timeline, by_operator

__all__ = ["PARTS", "Breakdown", "Span", "Timeline", "as_table", "breakdown", "breakdown_of_steps", "by_call_site"]
__all__ += ["by_operator", "timeline"]
