"""Cost: forecasts by formula, in seconds and bytes. `python -m scratch_ddp.instruments.cost` plans a training."""

from scratch_ddp.instruments.cost.layouts import Layout, rank_memory, step_time
from scratch_ddp.instruments.cost.models import ModelShape, bytes_per_token, flops_per_token, from_config
from scratch_ddp.instruments.cost.plan import BOUNDS, plan, tokens_to_be_compute_bound, what_binds
from scratch_ddp.instruments.cost.published import MODELS
from scratch_ddp.instruments.cost.states import (
    FP32,
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
)
from scratch_ddp.instruments.cost.wire import CLUSTERS, Accelerator, Cluster, Link, Wire, ring_bytes

__all__ = ["BOUNDS", "CLUSTERS", "FP32", "MODELS", "STAGES", "WIDE_GRADIENTS", "Accelerator", "Backward"]
__all__ += ["Cluster", "Layout", "Link", "ModelShape", "RankMemory", "Wire", "best_bucket", "best_bucket_bytes"]
__all__ += ["bucketed", "bytes_per_token", "bytes_sent", "flat", "flops_per_token", "from_config", "measured_states"]
__all__ += ["model_states", "naive", "per_parameter", "pipelined", "plan", "rank_memory", "ring_bytes"]
__all__ += ["step_time", "tokens_to_be_compute_bound", "what_binds"]
