"""The simulated link, measured: its own exactness, a published table of strategies on it, and how much is hidden."""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch
import torch._dynamo  # noqa: F401  torch's DDP imports it at its first forward, which takes seconds
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from scratch_ddp.benchmark import published_step
from scratch_ddp.benchmark.ranks import run_ranks
from scratch_ddp.benchmark.report import Figure, machine, markdown
from scratch_ddp.benchmark.sleeping_model import SleepingModel, scaled
from scratch_ddp.benchmark.timing import Spread, interleaved, spread_of
from scratch_ddp.cost import MB, Backward, bucketed
from scratch_ddp.ddp import BucketedDDP, FlatDDP, OverlappedDDP, SimpleDistributedDataParallelism
from scratch_ddp.link import Link, LinkedGroup, linked_group, lone_rank

_SCALE = 1 / 128  # of the published model: what a process holds and copies must not take time of its own
_SLOWEST_FIRST = [["naive"], ["flat"], ["1000 MB"], ["100 MB"], ["per parameter", "1 MB", "10 MB"]]
_TIED = 0.02  # of a step: what is closer together is in no order

Variants = dict[str, Callable[[], object]]


def exactness(group: LinkedGroup, transfers: int) -> tuple[Spread, float]:
    """Measured over stated seconds of transfers of 1 to 50 ms, and the share of a core that waiting for them takes."""
    tensor = torch.zeros(1000)  # small, so that moving it takes no time beside the link's
    ratios, waited, used = [], 0.0, 0.0
    for stated in (0.001, 0.005, 0.02, 0.05):
        group.link = Link(0.0002, (stated - 0.0002) / tensor.nbytes)  # two ranks send what they sum
        dist.barrier(group=group)
        for _ in range(transfers):
            began = time.perf_counter()
            work = dist.all_reduce(tensor, group=group, async_op=True)
            posted, busy = time.perf_counter(), time.process_time()
            work.wait()
            ended = time.perf_counter()
            ratios.append((ended - began) / stated)
            used, waited = used + time.process_time() - busy, waited + ended - posted
    return spread_of(ratios), used / waited


def _exactness_on_ranks(transfers: int) -> tuple[Spread, float]:
    return exactness(linked_group(None), transfers)


def exact(transfers: int) -> list[Figure]:
    """The rows on the link itself."""
    found = {"two ranks over gloo": run_ranks(2, _exactness_on_ranks, transfers, timeout=120)[0]}
    found["one process"] = exactness(lone_rank(2, None), transfers)
    dist.destroy_process_group()
    figures = []
    for where, (spread, share) in found.items():
        text = f"{spread.median:.4f} [{spread.low:.4f}–{spread.high:.4f}]"
        what = f"a transfer / (α + bytes·β), 1 to 50 ms, {where}"
        figures.append(Figure(what, "1 ± 0.03", text, abs(spread.median - 1) <= 0.03))
        figures.append(Figure(f"share of a core while waiting, {where}", "< 10 %", f"{share:.1%}", share < 0.1))
    return figures


def step(model: nn.Module) -> Callable[[], None]:
    """A training step without the optimizer."""

    def run() -> None:
        model.zero_grad()
        model().backward()
        if hasattr(model, "sync_gradients"):
            model.sync_gradients()

    return run


def ours(timeline: Backward) -> Variants:
    """Steps of our strategies, by the rows' names."""
    wrap: dict[str, Callable[[nn.Module], nn.Module]] = {
        "naive": SimpleDistributedDataParallelism,
        "flat": FlatDDP,
        "per parameter": OverlappedDDP,
    }
    for name, size in published_step.BUCKETS_MB.items():
        wrap[name] = lambda model, size=size: BucketedDDP(model, size * _SCALE)
    return {name: step(make(SleepingModel(timeline, gpu=True))) for name, make in wrap.items()}


def torchs(timeline: Backward) -> Variants:
    """Steps of torch's DDP with the same sizes of buckets."""
    sizes = {name: size * _SCALE for name, size in published_step.BUCKETS_MB.items()}
    return {
        f"torch DDP, {name}": step(DistributedDataParallel(SleepingModel(timeline, gpu=True), bucket_cap_mb=size))
        for name, size in sizes.items()
    }


def published_table(rounds: int) -> tuple[str, list[Figure]]:
    """The published steps beside their forecasts and what is measured on the link, in one process."""
    timeline = scaled(published_step.timeline(), _SCALE)
    link = published_step.link(timeline.total_bytes)
    lone_rank(2, link)
    forecasts = published_step.forecasts(timeline, link.wire(2), _SCALE)
    for name, size in published_step.BUCKETS_MB.items():  # torch's first bucket is small only where no size is given
        forecasts[f"torch DDP, {name}"] = bucketed(timeline, link.wire(2), size * _SCALE, first_mb=size * _SCALE)
    samples = interleaved(
        {"compute": step(SleepingModel(timeline, gpu=True)), **ours(timeline), **torchs(timeline)}, rounds, warm_up=2
    )
    dist.destroy_process_group()
    rows = ["| | published ms | forecast | measured | off the published |", "|---|---|---|---|---|"]
    medians = {}
    for name, taken in samples.items():
        spread = spread_of([1e3 * sample.wall for sample in taken])
        medians[name] = spread.median
        published = published_step.PUBLISHED.get(name, 1e3 * published_step.COMPUTE if name == "compute" else None)
        forecast = forecasts.get(name)
        off = f"{spread.median / published - 1:+.1%}" if published else ""
        cells = [f"{published:.0f}" if published else "", f"{1e3 * forecast.step:.0f}" if forecast else ""]
        measured = f"{spread.median:.0f} [{spread.low:.0f}–{spread.high:.0f}]"
        rows.append(f"| {name} | {' | '.join(cells)} | {measured} | {off} |")
    return "\n".join(rows), [in_order(medians), *within(medians)]


def in_order(medians: dict[str, float]) -> Figure:
    """Whether the groups of the published table come in its order."""
    groups = [[medians[name] for name in group] for group in _SLOWEST_FIRST]
    holds = all(min(slow) >= max(quick) * (1 - _TIED) for slow, quick in zip(groups, groups[1:], strict=False))
    said = " ≥ ".join("{" + ", ".join(group) + "}" for group in _SLOWEST_FIRST)
    return Figure("published table: order of its groups (2 % apart is a tie)", said, "yes" if holds else "no", holds)


def within(medians: dict[str, float]) -> list[Figure]:
    """How far the worst row is off."""
    off = {name: medians[name] / published - 1 for name, published in published_step.PUBLISHED.items()}
    worst = max(off, key=lambda name: abs(off[name]))
    text = f"{off[worst]:+.1%} ({worst}); the next {sorted(map(abs, off.values()))[-2]:.1%}"
    return [Figure("published table: every row's ms", "within 10 %", text, abs(off[worst]) <= 0.10)]


def hidden(rounds: int) -> list[Figure]:
    """What an overlapped step takes beyond its compute and the last transfer, where all else can be hidden."""
    timeline = Backward.in_proportion(48 * [MB // 16], 0.6, 0.3)
    group = lone_rank(2, Link(1e-4, 0.45 / timeline.total_bytes))
    wrapped = {
        "OverlappedDDP": OverlappedDDP(SleepingModel(timeline, gpu=True)),
        "BucketedDDP": BucketedDDP(SleepingModel(timeline, gpu=True), 0.25),
        "torch DDP": DistributedDataParallel(SleepingModel(timeline, gpu=True), bucket_cap_mb=0.25),
        "OverlappedDDP, hooks on top": OverlappedDDP(SleepingModel(timeline)),
        "BucketedDDP, hooks on top": BucketedDDP(SleepingModel(timeline), 0.25),
        "torch DDP, hooks on top": DistributedDataParallel(SleepingModel(timeline), bucket_cap_mb=0.25),
    }
    variants = {name: step(model) for name, model in wrapped.items()}
    last = {name: last_transfer(run, group) for name, run in variants.items()}
    samples = interleaved({"compute": step(SleepingModel(timeline, gpu=True)), **variants}, rounds)
    dist.destroy_process_group()
    figures = []
    for name, seconds in last.items():
        pairs = zip(samples[name], samples["compute"], strict=True)
        ratio = statistics.median(each.wall / (compute.wall + seconds) for each, compute in pairs)
        said = name.startswith("torch") or name.endswith("on top")
        figure = Figure(f"step / (compute + last transfer), {name}", "said", f"{ratio:.3f}", True)
        figures.append(figure if said else replace(figure, must="≤ 1.03", holds=ratio <= 1.03))
    return figures


def last_transfer(run: Callable[[], object], group: LinkedGroup) -> float:
    """Seconds that the last gradients of a step are on the wire."""
    run()  # torch's DDP makes its buckets in the first step
    group.transfers.clear()
    run()
    largest = max(each.nbytes for each in group.transfers)
    gradients = [each for each in group.transfers if 4 * each.nbytes >= largest]  # without what ranks agree on
    return gradients[-1].ended - gradients[-1].started


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=5, help="steps of each strategy that count (default 5)")
    parser.add_argument("--transfers", type=int, default=20, help="transfers of each length (default 20)")


def main(options: argparse.Namespace) -> int:
    print(f"The simulated link on {machine()}.\n", flush=True)
    torch.set_num_threads(1)
    figures = exact(options.transfers)
    table, about_it = published_table(options.rounds)
    figures += [*about_it, *hidden(options.rounds)]
    print(f"{table}\n\n{markdown(figures)}")
    return 0 if all(figure.holds for figure in figures) else 1
