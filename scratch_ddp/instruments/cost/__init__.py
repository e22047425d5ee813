"""What training costs, by formula: bytes and seconds of communication, and bytes of memory."""

from scratch_ddp.common.tensors import MB
from scratch_ddp.ddp.bucketed import FIRST_BUCKET_MB, bucket_plan
from scratch_ddp.instruments.cost.memory import (
    BF16_COMPUTE,
    FP32,
    MIXED,
    STAGES,
    ModelStates,
    Precision,
    bytes_sent,
    measured_states,
    model_states,
    states_table,
)
from scratch_ddp.instruments.cost.overlap import (
    Backward,
    Forecast,
    Message,
    best_bucket,
    best_bucket_bytes,
    bucketed,
    exposed_seconds,
    flat,
    grouped,
    naive,
    per_parameter,
)
from scratch_ddp.instruments.cost.wire import Wire, ring_bytes, ring_rounds, transfer_seconds

__all__ = [
    "FIRST_BUCKET_MB",
    "BF16_COMPUTE",
    "FP32",
    "MB",
    "MIXED",
    "STAGES",
    "Backward",
    "Forecast",
    "Message",
    "ModelStates",
    "Precision",
    "Wire",
    "best_bucket",
    "best_bucket_bytes",
    "bucket_plan",
    "bucketed",
    "bytes_sent",
    "exposed_seconds",
    "flat",
    "grouped",
    "measured_states",
    "model_states",
    "naive",
    "per_parameter",
    "ring_bytes",
    "ring_rounds",
    "states_table",
    "transfer_seconds",
]
