"""Distributed training from scratch for PyTorch under torchrun: data parallelism, ZeRO, FSDP, models that are split.

```python
from scratch_ddp import FSDP, BucketedDDP, get
```
These names are imported when they are first asked for: `import scratch_ddp` alone loads neither torch nor numpy.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

# torch reads it when it is imported. Otherwise its profiler writes two lines to stderr each time it is used.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

if TYPE_CHECKING:
    from scratch_ddp.context_parallel import ring_attention, ulysses_attention
    from scratch_ddp.ddp import BucketedDDP, FlatDDP, OverlappedDDP, SimpleDistributedDataParallelism
    from scratch_ddp.experts import ExpertParallel
    from scratch_ddp.fsdp import FSDP
    from scratch_ddp.mesh import cache_mesh, get
    from scratch_ddp.pipeline import Pipeline
    from scratch_ddp.tensor_parallel import ColumnParallelLinear, RowParallelLinear, parallelize
    from scratch_ddp.zero import ShardedOptimizer, reduce_gradients

_PLACES = {
    "scratch_ddp.context_parallel": ("ring_attention", "ulysses_attention"),
    "scratch_ddp.ddp": ("BucketedDDP", "FlatDDP", "OverlappedDDP", "SimpleDistributedDataParallelism"),
    "scratch_ddp.experts": ("ExpertParallel",),
    "scratch_ddp.fsdp": ("FSDP",),
    "scratch_ddp.mesh": ("cache_mesh", "get"),
    "scratch_ddp.pipeline": ("Pipeline",),
    "scratch_ddp.tensor_parallel": ("ColumnParallelLinear", "RowParallelLinear", "parallelize"),
    "scratch_ddp.zero": ("ShardedOptimizer", "reduce_gradients"),
}

__all__ = sorted(name for names in _PLACES.values() for name in names)


def __getattr__(name: str) -> Any:
    for place, names in _PLACES.items():
        if name in names:
            globals()[name] = getattr(importlib.import_module(place), name)
            return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def load_ipython_extension(shell: Any) -> None:
    """`%load_ext scratch_ddp`: cells that run on ranks (see `scratch_ddp.cells`)."""
    from scratch_ddp.cells import load_ipython_extension as load

    load(shell)
