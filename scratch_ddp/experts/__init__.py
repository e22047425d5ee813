"""Expert parallelism: each rank holds some of a layer's experts, and tokens travel to the experts they are routed to.

exchange    rows to their ranks: an all-to-all whose pieces have any size, with its backward
layer       the router, the experts of this rank, and the way there and back
"""

from scratch_ddp.experts.exchange import exchange_rows
from scratch_ddp.experts.layer import ExpertParallel

__all__ = ["ExpertParallel", "exchange_rows"]
