"""Traffic: what the ranks send each other while some code runs, in calls, messages, bytes and rounds.

`with traffic() as counted:` counts this rank's communication, whoever starts it. `counted.over_ranks()` puts all ranks
together. Set-up, such as checks, is counted apart.
"""

from scratch_ddp.instruments.cost.wire import ring_bytes, ring_rounds
from scratch_ddp.instruments.traffic.counts import Counted, Counts, Message, Totals, traffic

__all__ = ["Counted", "Counts", "Message", "Totals", "ring_bytes", "ring_rounds", "traffic"]
