"""The sharded model beside torch's `fully_shard`: seconds of a step, what a network hides, memory."""

import argparse
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from scratch_ddp.benchmark import options as step_options
from scratch_ddp.benchmark.options import build_llama, make_batch
from scratch_ddp.course.lessons.sleeping_model import SleepingBlocks
from scratch_ddp.fsdp import FSDP
from scratch_ddp.instruments.forked_ranks import run_ranks
from scratch_ddp.instruments.memory import memory_use
from scratch_ddp.instruments.network import Link, lone_rank
from scratch_ddp.instruments.timing import Figure, Sample, interleaved, machine, markdown, ratio

LARGER = {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 12, "num_attention_heads": 8}
LARGER["num_key_value_heads"] = 4  # 43 M parameters, 20 % of them outside of the blocks
OURS, TORCHS = "FSDP", "fully_shard"
Wrap = Callable[[nn.Module], nn.Module]


def blocks_of(model: nn.Module) -> list[nn.Module]:
    return list(model.blocks if isinstance(model, SleepingBlocks) else model.model.layers)


def sharded(model: nn.Module, **settings: Any) -> FSDP:
    return FSDP(model, units=blocks_of(model), **settings)


def sharded_by_torch(model: nn.Module, ahead: bool = False, **settings: Any) -> nn.Module:
    """`ahead`: with prefetch asked for, which on a CPU does not happen by itself: that needs CUDA streams."""
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


def step(model: nn.Module, **batch: Any) -> None:
    """Forward, backward, synchronisation; no optimizer."""
    output = model(**batch)
    getattr(output, "loss", output).backward()
    getattr(model, "sync_gradients", lambda: None)()  # torch's have no need of it
    model.zero_grad()


def measure_steps(rounds: int, device_type: str) -> dict[str, list[Sample]]:
    """On each rank: seconds of a step of the 16 M Llama. The same on every rank: the slowest one's."""
    device = torch.device(device_type)
    batch = {name: each.to(device) for name, each in make_batch(dist.get_rank()).items()}
    variants = {name: partial(step, wrap(build_llama().to(device)), **batch) for name, wrap in WRAPPERS.items()}
    return interleaved(variants, rounds=rounds, warm_up=3)


def table(samples: Mapping[str, Sequence[Sample]]) -> str:
    rows = ["| | wall / fully_shard | CPU / fully_shard | wall ms | CPU ms |", "|---|---|---|---|---|"]
    for name, each in samples.items():
        ratios = [str(ratio(each, samples[TORCHS], figure)) for figure in ("wall", "cpu")]
        medians = [f"{1e3 * statistics.median(getattr(one, figure) for one in each):.0f}" for figure in ("wall", "cpu")]
        rows.append(f"| {' | '.join([name, *ratios, *medians])} |")
    return "\n".join(rows)


def step_figures(samples: Mapping[str, Sequence[Sample]], ranks: int, backend: str) -> list[Figure]:
    what = f"step / torch fully_shard, {backend}, {ranks} ranks, Llama of 16 M, units = its blocks"
    figures = []
    for figure, called in (("wall", "time"), ("cpu", "CPU time")):
        found = ratio(samples[OURS], samples[TORCHS], figure)
        figures.append(Figure(f"{what}: {called}", "≤ 0.88 (aim 0.77)", str(found), found.median <= 0.88))
    return figures


def on_the_link(rounds: int) -> list[Figure]:
    """A rank of two whose blocks sleep for 0.6 s a step; an all-reduce of all gradients would take half of that."""
    count, nbytes = 12, 12 * 2**16  # small, so that copying it takes no time beside the link's
    group = lone_rank(2, Link(1e-4, 0.3 / nbytes))
    make = partial(SleepingBlocks, count, nbytes, 0.2, 0.4)
    wrapped = {
        "compute": make(),
        OURS: sharded(make()),
        "FSDP, no prefetch": sharded(make(), prefetch=0),
        TORCHS: sharded_by_torch(make()),
        "fully_shard with explicit prefetch": sharded_by_torch(make(), ahead=True),
    }
    variants = {name: partial(step, model) for name, model in wrapped.items()}
    samples = interleaved(variants, rounds, warm_up=2)
    group.transfers.clear()
    variants[OURS]()
    busy = sum(each.ended - each.started for each in group.transfers)
    dist.destroy_process_group()
    bound = max(busy, statistics.median(each.wall for each in samples["compute"]))
    walls = {name: statistics.median(each.wall for each in taken) for name, taken in samples.items()}
    beside = ratio(samples[OURS], samples["fully_shard with explicit prefetch"])
    best = walls[OURS] / bound
    others = ", ".join(f"{name} {walls[name] / bound:.2f}" for name in ("FSDP, no prefetch", TORCHS))
    return [
        Figure("on the link: step / max(compute, communication)", "≤ 1.10 (aim 1.06)", f"{best:.3f}", best <= 1.10),
        Figure("the same, others", "said", others, True),
        Figure(
            "on the link: step / fully_shard with explicit prefetch, on a CPU, where it overlaps nothing by itself",
            "≤ 0.85 (aim 0.78)",
            str(beside),
            beside.median <= 0.85,
        ),
    ]


def measure_memory(name: str, device_type: str) -> tuple[float, float]:
    """The parameters' bytes, and the peak of a later step with AdamW in their sizes."""
    device = torch.device(device_type)
    batch = {name: each.to(device) for name, each in make_batch(dist.get_rank()).items()}
    with memory_use() as until_then:
        model = build_llama(**LARGER).to(device)
        nbytes = sum(parameter.nbytes for parameter in model.parameters())
        model = WRAPPERS[name](model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

        def whole_step() -> None:
            model(**batch).loss.backward()
            getattr(model, "sync_gradients", lambda: None)()
            optimizer.step()
            optimizer.zero_grad()

        whole_step(), whole_step()
    with memory_use() as one_step:
        whole_step()
    return nbytes, (until_then.kept_bytes + one_step.peak_bytes) / nbytes


def memory_figures(ranks: int, backend: str, device_type: str) -> list[Figure]:
    peaks = {}
    for name in (OURS, TORCHS, "torch DDP", "FSDP, kept after forward"):
        found = run_ranks(ranks, measure_memory, name, device_type, backend=backend, timeout=300)
        peaks[name] = max(peak for _, peak in found)
    others = ", ".join(f"{name} {peak:.2f}" for name, peak in peaks.items() if name != OURS)
    what = (
        f"peak memory of a step / bytes of the parameters, AdamW, {ranks} ranks, {found[0][0] / 4e6:.0f} M parameters"
    )
    return [
        Figure(what, "≤ 2.96 (aim 2.80)", f"{peaks[OURS]:.2f}", peaks[OURS] <= 2.96),
        Figure("the same, others", "said", others, True),
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    step_options.add_arguments(parser, rounds=20)
    step_options.add_backend(parser)


def main(options: argparse.Namespace) -> int:
    if problem := step_options.problem(options):
        print(problem, file=sys.stderr)
        return 2
    device_type = "cuda" if options.backend == "nccl" else "cpu"
    print(f"A sharded model, {options.ranks} ranks, {options.backend}, {machine()}.\n", flush=True)
    torch.set_num_threads(1)
    step_options.import_early()
    timeout = 60 + 30.0 * options.rounds
    arguments = (options.rounds, device_type)
    samples, *_ = run_ranks(options.ranks, measure_steps, *arguments, backend=options.backend, timeout=timeout)
    figures = step_figures(samples, options.ranks, options.backend)
    figures += memory_figures(options.ranks, options.backend, device_type)
    figures += on_the_link(min(options.rounds, 7))
    print(table(samples), markdown(figures), sep="\n\n")
    return 0 if all(figure.holds for figure in figures) else 1
