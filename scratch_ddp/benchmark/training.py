"""Steps of a Llama of 16 M parameters by DDP, FSDP and ZeRO beside torch's, with and without AdamW; peaks for 43 M."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from scratch_ddp.benchmark import steps
from scratch_ddp.ddp import BucketedDDP
from scratch_ddp.fsdp import FSDP
from scratch_ddp.instruments.memory.use import memory_use
from scratch_ddp.instruments.timing import Sample, interleaved
from scratch_ddp.zero import ShardedOptimizer

Wrap = Callable[[nn.Module], nn.Module]
LARGER = {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 12, "num_attention_heads": 8}
LARGER["num_key_value_heads"] = 4  # 43 M parameters, 20 % of them outside the blocks
ADAMW, WHOLE = ", with AdamW", ", whole step"


def sharded(model: nn.Module, **settings: object) -> nn.Module:
    return FSDP(model, units=list(model.model.layers), **settings)


def sharded_by_torch(model: nn.Module, **settings: object) -> nn.Module:
    for module in [*model.model.layers, model]:
        fully_shard(module, **settings)
    return model


DDP: dict[str, Wrap] = {
    "torch's DDP": DistributedDataParallel,
    "torch's DDP at its best": partial(DistributedDataParallel, gradient_as_bucket_view=True, static_graph=True),
    "BucketedDDP": BucketedDDP,
}
SHARDED: dict[str, Wrap] = {"fully_shard": sharded_by_torch, "FSDP": sharded}


def measure(rounds: int, wrappers: dict[str, Wrap], sizes: dict[str, int]) -> dict[str, list[Sample]]:
    """On each rank: steps of every wrapper with a model of its own, without and with AdamW (fused), in turns."""
    batch, variants = steps.make_batch(dist.get_rank()), {}
    for name, wrap in wrappers.items():
        model = wrap(steps.build_llama(**sizes))
        optimizer = AdamW(model.parameters(), lr=1e-4, fused=True)
        variants[name] = partial(steps.step, model, **batch)
        variants[name + ADAMW] = partial(steps.step, model, optimizer, **batch)
    return interleaved(variants, rounds)


def measure_on_mesh(rounds: int, sizes: dict[str, int]) -> dict[str, list[Sample]]:
    """The same on 2 × 2 ranks: sharded in the row, replicated over the column."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    wrappers = {"fully_shard": partial(sharded_by_torch, mesh=mesh), "FSDP": partial(sharded, group=mesh)}
    return measure(rounds, wrappers, sizes)


def measure_zero(rounds: int, sizes: dict[str, int]) -> dict[str, list[Sample]]:
    """The optimizers' steps alone, and whole steps: each with BucketedDDP or torch's DDP."""
    batch, variants = steps.make_batch(dist.get_rank()), {}
    kinds = {
        "ZeroRedundancyOptimizer": (DistributedDataParallel, partial(ZeroRedundancyOptimizer, optimizer_class=AdamW)),
        "ShardedOptimizer": (BucketedDDP, partial(ShardedOptimizer, optimizer_cls=AdamW)),
    }
    for name, (wrap, make) in kinds.items():
        alone, model = (steps.build_llama(**sizes) for _ in range(2))
        for parameter in alone.parameters():
            parameter.grad = torch.ones_like(parameter)
        model = wrap(model)
        variants[name] = make(alone.parameters(), lr=1e-3).step
        variants[name + WHOLE] = partial(steps.step, model, make(model.parameters(), lr=1e-3), **batch)
    return interleaved(variants, rounds)


def peak(_: int, wrap: Wrap, sizes: dict[str, int]) -> float:
    """On each rank: the peak memory of a later step with AdamW, in units of the parameters' bytes."""
    batch = steps.make_batch(dist.get_rank())
    with memory_use() as until_then:
        model = steps.build_llama(**sizes)
        nbytes = sum(parameter.nbytes for parameter in model.parameters())
        model = wrap(model)
        optimizer = AdamW(model.parameters(), lr=1e-4)
        for _ in range(2):
            steps.step(model, optimizer, **batch)
    with memory_use() as one_step:
        steps.step(model, optimizer, **batch)
    return (until_then.kept_bytes + one_step.peak_bytes) / nbytes


def rows(rounds: int, sizes: dict[str, int] = steps.LLAMA, larger: dict[str, int] = LARGER) -> Iterator[steps.Row]:
    """`sizes`, `larger`: of the models that are timed, and whose memory is measured."""
    replicas = [("BucketedDDP" + end, each + end) for end in ("", ADAMW) for each in list(DDP)[:2]]
    shards = [("FSDP" + end, "fully_shard" + end) for end in ("", ADAMW)]
    optimizers = [("ShardedOptimizer" + end, "ZeroRedundancyOptimizer" + end) for end in ("", WHOLE)]
    yield from steps.beside(steps.on_ranks(2, measure, rounds, DDP, sizes), replicas)
    yield from steps.beside(steps.on_ranks(2, measure, rounds, SHARDED, sizes), shards)
    on_mesh = steps.beside(steps.on_ranks(4, measure_on_mesh, max(1, rounds // 2), sizes), shards)
    yield from ((f"mesh of 2 × 2: {what}", figure) for what, figure in on_mesh)
    yield from steps.beside(steps.on_ranks(2, measure_zero, rounds, sizes), optimizers)
    for name, wrap in {**SHARDED, "torch's DDP": DistributedDataParallel}.items():
        most = steps.on_ranks(2, peak, 5, wrap, larger)
        yield f"peak memory of a step with AdamW / bytes of the parameters, {name}", f"{most:.2f}"
