"""Cost: forecasts by formula, in seconds and bytes.

`wire`: links, and the seconds of a collective among ranks on any hosts. `steps`: the seconds of a training step under
each strategy of data parallelism and of a model that is split, and the best size of a bucket. `states`: the bytes of a
model's states under DDP and ZeRO.

Before there is a model: `models` has its sizes, from a config without weights, and what a token takes; `layouts` and
`times` say what each rank holds and how long a step takes on one of the `clusters`, `plan` which layouts are best, and
`published` what others have reached. `python -m scratch_ddp.instruments.cost` prints the best layouts.
"""

from scratch_ddp.instruments.cost.clusters import CLUSTERS, Accelerator, Cluster
from scratch_ddp.instruments.cost.layouts import Layout, rank_memory
from scratch_ddp.instruments.cost.models import ModelShape, bytes_per_token, flops_per_token, from_config
from scratch_ddp.instruments.cost.plan import BOUNDS, plan, tokens_to_be_compute_bound, what_binds
from scratch_ddp.instruments.cost.published import MODELS, model
from scratch_ddp.instruments.cost.states import (
    FP32,
    MIXED,
    STAGES,
    WIDE_GRADIENTS,
    RankMemory,
    bytes_sent,
    measured_states,
    model_states,
)
from scratch_ddp.instruments.cost.steps import (
    Backward,
    best_bucket,
    best_bucket_bytes,
    bucketed,
    flat,
    naive,
    per_parameter,
    pipelined,
    tensor_parallel,
)
from scratch_ddp.instruments.cost.times import step_time
from scratch_ddp.instruments.cost.wire import Link, Wire, ring_bytes

__all__ = ["BOUNDS", "CLUSTERS", "FP32", "MIXED", "MODELS", "STAGES", "WIDE_GRADIENTS", "Accelerator", "Backward"]
__all__ += ["Cluster", "Layout", "Link", "ModelShape", "RankMemory", "Wire", "best_bucket", "best_bucket_bytes"]
__all__ += ["bucketed", "bytes_per_token", "bytes_sent", "flat", "flops_per_token", "from_config", "measured_states"]
__all__ += ["model", "model_states", "naive", "per_parameter", "pipelined", "plan", "rank_memory", "ring_bytes"]
__all__ += ["step_time", "tensor_parallel", "tokens_to_be_compute_bound", "what_binds"]
