"""What communication costs, by formula: bytes, rounds and seconds of a collective, and of a whole training step."""

from scratch_ddp.cost.backward import Backward
from scratch_ddp.cost.buckets import best_bucket, best_bucket_bytes, exposed_seconds
from scratch_ddp.cost.overlap import Forecast, Message, bucket_plan, bucketed, flat, naive, per_parameter
from scratch_ddp.cost.wire import MB, Wire, ring_bytes, ring_rounds, transfer_seconds

__all__ = [
    "MB",
    "Backward",
    "Forecast",
    "Message",
    "Wire",
    "best_bucket",
    "best_bucket_bytes",
    "bucket_plan",
    "bucketed",
    "exposed_seconds",
    "flat",
    "naive",
    "per_parameter",
    "ring_bytes",
    "ring_rounds",
    "transfer_seconds",
]
