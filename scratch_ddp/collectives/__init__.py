"""Broadcast, reduce, all-reduce, all-gather and reduce-scatter made of send and receive, called as torch's are.

Tensors may have any size (also no elements, or fewer than ranks), dtype and strides; groups any number of ranks. `src`
and `dst` are global ranks. Wrong arguments, and ranks that ask for different things, raise the same error on every
rank. That check costs one small all-reduce besides the costs stated, counted as set-up; `unchecked()` leaves it out.
Memory that a call receives into is kept for the next call, up to `scratch.MOST` bytes.

In the costs, n is the number of ranks in the group, S the bytes of `tensor` (of one tensor of a list), and depth the
longest chain of messages each of which waits for the one before.
"""

from scratch_ddp.collectives.checked import unchecked
from scratch_ddp.collectives.direct import all_gather, reduce_scatter
from scratch_ddp.collectives.exchange import send_recv
from scratch_ddp.collectives.ring import false_ring_all_reduce, ring_all_reduce
from scratch_ddp.collectives.tree import reduce, star_broadcast, tree_broadcast

__all__ = ["all_gather", "false_ring_all_reduce", "reduce", "reduce_scatter", "ring_all_reduce", "send_recv"]
__all__ += ["star_broadcast", "tree_broadcast", "unchecked"]
