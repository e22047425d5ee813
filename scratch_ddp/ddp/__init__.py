"""Data-parallel strategies with one protocol (see `base`): each wraps a model and averages its gradients."""

from scratch_ddp.ddp.base import ReplicatedModule
from scratch_ddp.ddp.batch_norm import SyncBatchNorm
from scratch_ddp.ddp.bucketed import BucketedDDP
from scratch_ddp.ddp.reducer import OverlappedDDP
from scratch_ddp.ddp.simple import FlatDDP, SimpleDistributedDataParallelism

__all__ = ["BucketedDDP", "FlatDDP", "OverlappedDDP", "ReplicatedModule", "SimpleDistributedDataParallelism"]
__all__ += ["SyncBatchNorm"]
