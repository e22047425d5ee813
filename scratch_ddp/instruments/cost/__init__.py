"""Cost: forecasts by formula, in seconds and bytes.

`wire`: the bytes, rounds and seconds of a collective. `step`: the seconds of a training step under each strategy of
data parallelism. `split`: those of a model that is split, by tensor parallelism or in a pipeline. `bucket_size`: the
best size of a bucket. `two_levels`: hosts whose ranks share a network card. `memory`: the bytes of a model's states
under DDP and ZeRO.
"""

from scratch_ddp.instruments.cost.bucket_size import best_bucket, best_bucket_bytes, exposed_by_formula
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
from scratch_ddp.instruments.cost.split import pipelined, tensor_parallel
from scratch_ddp.instruments.cost.step import (
    AllReduce,
    Backward,
    Forecast,
    bucketed,
    flat,
    grouped,
    naive,
    per_parameter,
)
from scratch_ddp.instruments.cost.two_levels import Passage, TwoLevels
from scratch_ddp.instruments.cost.wire import Wire, ring_bytes, ring_rounds, transfer_seconds

__all__ = ["BF16_COMPUTE", "FP32", "MIXED", "STAGES", "AllReduce", "Backward", "Forecast", "ModelStates"]
__all__ += ["Precision", "Wire", "best_bucket", "best_bucket_bytes", "bucketed", "bytes_sent"]
__all__ += ["exposed_by_formula", "flat", "grouped", "measured_states", "model_states", "naive"]
__all__ += ["per_parameter", "pipelined", "ring_bytes", "ring_rounds", "states_table", "tensor_parallel"]
__all__ += ["transfer_seconds", "Passage", "TwoLevels"]
