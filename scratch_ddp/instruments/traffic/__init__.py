"""Traffic: what the ranks send each other while some code runs, in calls, messages, bytes and rounds."""

from scratch_ddp.instruments.cost.wire import ring_bytes, ring_rounds
from scratch_ddp.instruments.traffic.counts import Counted, Counts, Message, Totals, traffic

__all__ = ["Counted", "Counts", "Message", "Totals", "ring_bytes", "ring_rounds", "traffic"]
