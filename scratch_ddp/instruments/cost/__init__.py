"""Cost: forecasts by formula, in seconds and bytes.

`wire`: the bytes, rounds and seconds of a collective. `step`: the seconds of a training step under each strategy of
data parallelism, and of a model that is split. `bucket_size`: the best size of a bucket. `two_levels`: hosts whose
ranks share a network card. `memory`: the bytes of a model's states under DDP and ZeRO.

Before there is a model: `transformer` has its sizes, from a config without weights, and what a token takes; `layouts`
says how a cluster may train it, what each rank holds, and how long a step takes. `python -m
scratch_ddp.instruments.cost` prints the best layouts.
"""

from scratch_ddp.instruments.cost.bucket_size import best_bucket, best_bucket_bytes, exposed_by_formula
from scratch_ddp.instruments.cost.layouts.bounds import (
    BOUNDS,
    best_mesh,
    operations_per_byte,
    tokens_to_be_compute_bound,
    what_binds,
)
from scratch_ddp.instruments.cost.layouts.clusters import CLUSTERS, Accelerator, Cluster, cluster
from scratch_ddp.instruments.cost.layouts.forecast import StepTime, step_time
from scratch_ddp.instruments.cost.layouts.layout import Layout, RankMemory, rank_memory
from scratch_ddp.instruments.cost.layouts.models import MODELS, model
from scratch_ddp.instruments.cost.layouts.plan import Plan, plan
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
from scratch_ddp.instruments.cost.step import (
    AllReduce,
    Backward,
    Forecast,
    bucketed,
    flat,
    grouped,
    naive,
    per_parameter,
    pipelined,
    tensor_parallel,
)
from scratch_ddp.instruments.cost.transformer.activations import bytes_per_token, logits_bytes, saved_bytes
from scratch_ddp.instruments.cost.transformer.flops import batch_trade, flops_per_token, training, utilisation
from scratch_ddp.instruments.cost.transformer.shape import ModelShape, from_config
from scratch_ddp.instruments.cost.two_levels import Passage, TwoLevels
from scratch_ddp.instruments.cost.wire import Wire, ring_bytes, ring_rounds, transfer_seconds

__all__ = ["BF16_COMPUTE", "FP32", "MIXED", "STAGES", "AllReduce", "Backward", "Forecast", "ModelStates"]
__all__ += ["Precision", "Wire", "best_bucket", "best_bucket_bytes", "bucketed", "bytes_sent"]
__all__ += ["exposed_by_formula", "flat", "grouped", "measured_states", "model_states", "naive"]
__all__ += ["per_parameter", "pipelined", "ring_bytes", "ring_rounds", "states_table", "tensor_parallel"]
__all__ += ["transfer_seconds", "Passage", "TwoLevels"]
__all__ += ["BOUNDS", "Plan", "best_mesh", "operations_per_byte", "plan", "tokens_to_be_compute_bound", "what_binds"]
__all__ += ["CLUSTERS", "MODELS", "Accelerator", "Cluster", "Layout", "ModelShape", "RankMemory", "StepTime"]
__all__ += ["batch_trade", "bytes_per_token", "cluster", "flops_per_token", "from_config", "logits_bytes", "model"]
__all__ += ["rank_memory", "saved_bytes", "step_time", "training", "utilisation"]
