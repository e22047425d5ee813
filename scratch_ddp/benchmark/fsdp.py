"""The sharded model against torch's `fully_shard`: seconds of a step, hidden communication, memory."""

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from scratch_ddp.benchmark import steps
from scratch_ddp.benchmark.command import REPORTED, TableRow, cpu_row
from scratch_ddp.course.pages.sleeping import SleepingBlocks
from scratch_ddp.fsdp import FSDP
from scratch_ddp.instruments.forked_ranks import run_ranks
from scratch_ddp.instruments.memory import memory_use
from scratch_ddp.instruments.network import Link, lone_rank
from scratch_ddp.instruments.timing import Sample, interleaved, ratio

LARGER = {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 12, "num_attention_heads": 8}
LARGER["num_key_value_heads"] = 4  # 43 M parameters, 20 % of them outside the blocks
OURS, TORCHS = "FSDP", "fully_shard"
Wrap = Callable[[nn.Module], nn.Module]


def blocks_of(model: nn.Module) -> list[nn.Module]:
    return list(model.blocks if isinstance(model, SleepingBlocks) else model.model.layers)


def sharded(model: nn.Module, **settings: Any) -> FSDP:
    return FSDP(model, units=blocks_of(model), **settings)


def sharded_by_torch(model: nn.Module, ahead: bool = False, **settings: Any) -> nn.Module:
    """`ahead`: with explicit prefetch. Implicit prefetch needs CUDA streams, so a CPU has none."""
    blocks = blocks_of(model)
    for module in [*blocks, model]:
        fully_shard(module, **settings)
    if ahead:
        for module in [*blocks, model]:
            module._set_unshard_async_op(True)
        model.set_modules_to_forward_prefetch(blocks[:1])
        for one, following in zip(blocks, blocks[1:], strict=False):
            one.set_modules_to_forward_prefetch([following])
            following.set_modules_to_backward_prefetch([one])
    return model


WRAPPERS: dict[str, Wrap] = {
    TORCHS: sharded_by_torch,
    "fully_shard, kept after forward": partial(sharded_by_torch, reshard_after_forward=False),
    OURS: sharded,
    "FSDP, no prefetch": partial(sharded, prefetch=0),
    "FSDP, kept after forward": partial(sharded, free_after_forward=False),
    "torch DDP": DistributedDataParallel,
    "no synchronisation": lambda model: model,
}


def measure_steps(rounds: int, device_type: str) -> dict[str, list[Sample]]:
    """On each rank: seconds of a step of the 16 M Llama. Collective; those of the slowest rank."""
    batch = steps.make_batch(dist.get_rank(), device_type)
    models = {name: wrap(steps.build_llama().to(device_type)) for name, wrap in WRAPPERS.items()}
    variants = {name: partial(steps.step, model, **batch) for name, model in models.items()}
    return interleaved(variants, rounds=rounds, warm_up=3)


def step_rows(samples: Mapping[str, Sequence[Sample]], ranks: int, backend: str) -> list[TableRow]:
    """Wall and CPU seconds of a step, both judged."""
    what = f"step / torch fully_shard, {backend}, {ranks} ranks, Llama of 16 M, units = its blocks"
    rows = []
    for figure, called in (("wall", "time"), ("cpu", "CPU time")):
        found = ratio(samples[OURS], samples[TORCHS], figure)
        rows.append(TableRow(f"{what}: {called}", "≤ 0.88 (aim 0.77)", str(found), found.median <= 0.88))
    return rows


def measure_on_mesh(rounds: int, device_type: str) -> dict[str, list[Sample]]:
    """The same on 2 × 2 ranks: sharded in the row, replicated over the column."""
    mesh = init_device_mesh(device_type, (2, 2), mesh_dim_names=("replicate", "shard"))
    batch = steps.make_batch(dist.get_rank(), device_type)
    models = {OURS: sharded(steps.build_llama().to(device_type), group=mesh)}
    models[TORCHS] = sharded_by_torch(steps.build_llama().to(device_type), mesh=mesh)
    variants = {name: partial(steps.step, model, **batch) for name, model in models.items()}
    return interleaved(variants, rounds=rounds, warm_up=3)


def mesh_rows(rounds: int, backend: str, device_type: str) -> list[TableRow]:
    """HSDP against torch's, both judged by CPU seconds."""
    found = run_ranks(4, measure_on_mesh, rounds, device_type, backend=backend, timeout=60 + 60.0 * rounds)[0]
    what = f"HSDP on 2 × 2 ranks, step / torch fully_shard on the same mesh, {backend}, {rounds} rounds"
    return [cpu_row(what, found[OURS], found[TORCHS], "≤ 0.95", 0.95)]


def link_rows(rounds: int) -> list[TableRow]:
    """A rank of two whose blocks sleep for 0.6 s per step; an all-reduce of all gradients would take half of that."""
    count, nbytes = 12, 12 * 2**16  # small, so that copying takes little time compared with the link
    group = lone_rank(2, Link(1e-4, 0.3 / nbytes))
    make = partial(SleepingBlocks, count, nbytes, 0.2, 0.4)
    wrapped = {
        "compute": make(),
        OURS: sharded(make()),
        "FSDP, no prefetch": sharded(make(), prefetch=0),
        TORCHS: sharded_by_torch(make()),
        "fully_shard with explicit prefetch": sharded_by_torch(make(), ahead=True),
    }
    variants = {name: partial(steps.step, model) for name, model in wrapped.items()}
    samples = interleaved(variants, rounds, warm_up=2)
    group.transfers.clear()
    variants[OURS]()
    walls = {name: statistics.median(each.wall for each in taken) for name, taken in samples.items()}
    bound = max(group.busy_seconds, walls["compute"])
    dist.destroy_process_group()
    against = ratio(samples[OURS], samples["fully_shard with explicit prefetch"])
    what = "on the link: step / fully_shard with explicit prefetch (without it, a CPU overlaps nothing)"
    best = walls[OURS] / bound
    others = ", ".join(f"{name} {walls[name] / bound:.2f}" for name in ("FSDP, no prefetch", TORCHS))
    return [
        TableRow("on the link: step / max(compute, communication)", "≤ 1.10 (aim 1.06)", f"{best:.3f}", best <= 1.10),
        TableRow("the same, others", REPORTED, others, True),
        TableRow(what, "≤ 0.85 (aim 0.78)", str(against), against.median <= 0.85),
    ]


def measure_memory(name: str, device_type: str) -> tuple[float, float]:
    """The parameters' bytes, and the peak memory of a later step with AdamW in units of them."""
    batch = steps.make_batch(dist.get_rank(), device_type)
    with memory_use() as until_then:
        model = steps.build_llama(**LARGER).to(device_type)
        nbytes = sum(parameter.nbytes for parameter in model.parameters())
        model = WRAPPERS[name](model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        for _ in range(2):
            steps.step(model, optimizer, **batch)
    with memory_use() as one_step:
        steps.step(model, optimizer, **batch)
    return nbytes, (until_then.kept_bytes + one_step.peak_bytes) / nbytes


def memory_rows(ranks: int, backend: str, device_type: str) -> list[TableRow]:
    """The peak of a step with AdamW, in units of the parameters' bytes."""
    peaks = {}
    for name in (OURS, TORCHS, "torch DDP", "FSDP, kept after forward"):
        found = run_ranks(ranks, measure_memory, name, device_type, backend=backend, timeout=300)
        peaks[name] = max(peak for _, peak in found)
    others = ", ".join(f"{name} {peak:.2f}" for name, peak in peaks.items() if name != OURS)
    millions = found[0][0] / 4e6
    what = f"peak memory of a step / bytes of the parameters, AdamW, {ranks} ranks, {millions:.0f} M parameters"
    return [
        TableRow(what, "≤ 2.96 (aim 2.80)", f"{peaks[OURS]:.2f}", peaks[OURS] <= 2.96),
        TableRow("the same, others", REPORTED, others, True),
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    steps.add_arguments(parser, rounds=20)


def main(options: argparse.Namespace) -> int:
    return steps.run(options, "A sharded model", _measure)


def _measure(options: argparse.Namespace, device_type: str) -> tuple[list[TableRow], str]:
    samples = steps.sample_on_ranks(options, measure_steps, device_type)
    rows = step_rows(samples, options.ranks, options.backend)
    if options.backend == "gloo" or torch.cuda.device_count() >= 4:
        rows += mesh_rows(min(options.rounds, 10), options.backend, device_type)
    rows += memory_rows(options.ranks, options.backend, device_type)
    rows += link_rows(min(options.rounds, 7))
    return rows, steps.times_table(samples, TORCHS, ("wall", "cpu"))
