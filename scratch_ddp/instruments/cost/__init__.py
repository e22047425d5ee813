"""Cost: forecasts by formula, in seconds and bytes.

`wire`: the bytes, rounds and seconds of a collective. `step`: the seconds of a training step under each strategy of
data parallelism. `split`: those of a model that is split, by tensor parallelism or in a pipeline. `bucket_size`: the
best size of a bucket. `two_levels`: hosts whose ranks share a network card. `memory`: the bytes of a model's states
under DDP and ZeRO.

Before there is a model: `shape`: its sizes, from a config without weights. `activations`, `flops`: what a token takes.
`models`, `clusters`: data, with sources. `layout`: what a rank holds. `forecast`: the seconds of a step. `bounds`: from
which batch on computing takes longer than sending. `plan`: the best layouts on a cluster; `python -m
scratch_ddp.instruments.cost` prints them.
"""

from scratch_ddp.instruments.cost.activations import bytes_per_token, logits_bytes, saved_bytes
from scratch_ddp.instruments.cost.bounds import (
    BOUNDS,
    best_mesh,
    operations_per_byte,
    tokens_to_be_compute_bound,
    what_binds,
)
from scratch_ddp.instruments.cost.bucket_size import best_bucket, best_bucket_bytes, exposed_by_formula
from scratch_ddp.instruments.cost.clusters import CLUSTERS, Accelerator, Cluster, cluster
from scratch_ddp.instruments.cost.flops import batch_trade, flops_per_token, training, utilisation
from scratch_ddp.instruments.cost.forecast import StepTime, step_time
from scratch_ddp.instruments.cost.layout import Layout, RankMemory, rank_memory
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
from scratch_ddp.instruments.cost.models import MODELS, model
from scratch_ddp.instruments.cost.plan import Plan, plan
from scratch_ddp.instruments.cost.shape import ModelShape, from_config
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
__all__ += ["BOUNDS", "Plan", "best_mesh", "operations_per_byte", "plan", "tokens_to_be_compute_bound", "what_binds"]
__all__ += ["CLUSTERS", "MODELS", "Accelerator", "Cluster", "Layout", "ModelShape", "RankMemory", "StepTime"]
__all__ += ["batch_trade", "bytes_per_token", "cluster", "flops_per_token", "from_config", "logits_bytes", "model"]
__all__ += ["rank_memory", "saved_bytes", "step_time", "training", "utilisation"]
