"""The simulated link, measured: its exactness, a published table of strategies on it, hidden communication, and one
model that is split in several ways.

Exactness is measured by transfers of stated lengths, and the processor time that waiting for them takes.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import median
from typing import NamedTuple

import torch
import torch._dynamo  # noqa: F401  torch's DDP imports it at its first forward, which takes seconds
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from scratch_ddp.benchmark.command import REPORTED, TableRow, positive_count, report
from scratch_ddp.benchmark.steps import step
from scratch_ddp.course.pages import published_step, split_model
from scratch_ddp.course.pages.sleeping import SleepingModel, scaled
from scratch_ddp.ddp import BucketedDDP, FlatDDP, OverlappedDDP, SimpleDistributedDataParallelism
from scratch_ddp.instruments.cost import Backward, Forecast, Wire, bucketed, flat, naive, per_parameter
from scratch_ddp.instruments.forked_ranks import run_ranks
from scratch_ddp.instruments.network import PRESETS, Link, LinkedGroup, linked_group, lone_rank
from scratch_ddp.instruments.timing import Spread, interleaved, machine, spread_of

LENGTHS = (0.001, 0.005, 0.02, 0.05)  # seconds
_BYTES = 4000  # few, so that moving them takes little time compared with the link
_OFF, _SHARE = 0.03, 0.10  # limits: relative error of a length, share of a core while waiting


class TimedTransfer(NamedTuple):
    """One transfer on one rank: when it was called, when the call returned, when the wait ended; CPU of the wait."""

    began: float
    posted: float
    ended: float
    cpu: float  # seconds of the process, including gloo's threads


@dataclass
class Exactness:
    """Transfers of one length: their seconds in units of the stated length, and the share of a core used waiting.

    `late`: at least a quarter of the messages take longer than stated even without a link, which can't speed them up.
    """

    ratios: Spread
    share: float
    late: bool = False

    def rows(self, what: str) -> list[TableRow]:
        """Both as rows of the table."""
        text = f"{self.ratios.median:.4f} [{self.ratios.low:.4f}–{self.ratios.high:.4f}]"
        exact, idle = abs(self.ratios.median - 1) <= _OFF, self.share < _SHARE
        must = f"{REPORTED}: a quarter of the messages take longer without a link" if self.late else f"1 ± {_OFF:g}"
        return [
            TableRow(f"a transfer / (α + bytes·β), {what}", must, text, exact or self.late),
            TableRow(f"share of a core while waiting, {what}", f"< {100 * _SHARE:.0f} %", f"{self.share:.1%}", idle),
        ]


def exactness(stated: float, ranks: Sequence[Sequence[TimedTransfer]], without: Sequence[TimedTransfer]) -> Exactness:
    """Judge the transfers by medians over the first of the `ranks`.

    A transfer begins when its last rank calls it. The processor time of the same calls `without` a link is spent on
    moving the data, not on waiting.
    """
    mine, began = ranks[0], [max(each.began for each in together) for together in zip(*ranks, strict=True)]
    ratios = [(each.ended - at) / stated for each, at in zip(mine, began, strict=True)]
    cpu, moving = (median(each.cpu for each in some) for some in (mine, without))
    waited = median(each.ended - each.posted for each in mine)
    late = spread_of([each.ended - each.began for each in without]).high > stated
    return Exactness(spread_of(ratios), max(0.0, cpu - moving) / waited, late)


def time_transfers(group: LinkedGroup, transfers: int) -> dict[float, list[TimedTransfer]]:
    """On each rank: transfers of each length, one after the other; length 0 stands for no link."""
    tensor, found = torch.zeros(_BYTES // 4), {}
    for stated in (0.0, *LENGTHS):
        group.link = Link(0.0002, (stated - 0.0002) / tensor.nbytes) if stated else None  # each of two ranks sends all
        dist.barrier(group=group)
        found[stated] = [_time_transfer(tensor, group) for _ in range(transfers)]
    return found


def _time_transfer(tensor: torch.Tensor, group: LinkedGroup) -> TimedTransfer:
    began = time.perf_counter()
    work = dist.all_reduce(tensor, group=group, async_op=True)
    posted, busy = time.perf_counter(), time.process_time()
    work.wait()
    return TimedTransfer(began, posted, time.perf_counter(), time.process_time() - busy)


def exactness_rows(transfers: int) -> list[TableRow]:
    """The rows on the link itself, for both modes and each length."""

    def on_ranks() -> dict[float, list[TimedTransfer]]:
        return time_transfers(linked_group(None), transfers)

    found = {"two ranks over gloo": run_ranks(2, on_ranks, timeout=60 + transfers)}
    found["one process"] = [time_transfers(lone_rank(2, None), transfers)]
    dist.destroy_process_group()
    rows = []
    for where, ranks in found.items():
        for stated in LENGTHS:
            judged = exactness(stated, [each[stated] for each in ranks], ranks[0][0.0])
            rows += judged.rows(f"{1e3 * stated:g} ms, {where}")
    return rows


_SCALE = 1 / 128  # of the published model, so that holding and copying it takes little time
_SLOWEST_FIRST = [["naive"], ["flat"], ["1000 MB"], ["100 MB"], ["per parameter", "1 MB", "10 MB"]]
_TIED = 0.02  # of a step: rows that were published this close together need not come in their order
_LEGEND = """\
(fitted): the link and the timeline were made so that these rows come out; the others are forecasts.
step / (compute + last transfer): 1 if all communication but the last message is hidden. The hooks (which copy a
gradient into its message and start it) run beside the compute, as if a GPU computed. torch's rows are only reported."""

_FITTED = ("naive", "flat", "per parameter", "1000 MB")  # the published link and timeline were fitted to these rows
BUCKETS_MB = {name: int(name.split()[0]) for name in published_step.CALLS}

Variants = dict[str, Callable[[], object]]


def forecasts_of(backward: Backward, wire: Wire, mb: float = 1.0) -> dict[str, Forecast]:
    """The forecast of each row, with bucket sizes scaled by `mb` as the timeline's gradients are."""
    rows = {
        "naive": naive(backward, wire),
        "flat": flat(backward, wire),
        "per parameter": per_parameter(backward, wire),
    }
    return rows | {name: bucketed(backward, wire, size * mb) for name, size in BUCKETS_MB.items()}


def ours(timeline: Backward) -> Variants:
    """Steps of our strategies, by the rows' names."""
    wrap: dict[str, Callable[[nn.Module], nn.Module]] = {
        "naive": SimpleDistributedDataParallelism,
        "flat": FlatDDP,
        "per parameter": OverlappedDDP,
    }
    for name, size in BUCKETS_MB.items():
        wrap[name] = lambda model, size=size: BucketedDDP(model, size * _SCALE)
    return {name: partial(step, make(SleepingModel(timeline))) for name, make in wrap.items()}


def torchs(timeline: Backward) -> Variants:
    """Steps of torch's DDP with the same bucket sizes."""
    found = {}
    for name, size in BUCKETS_MB.items():
        model = DistributedDataParallel(SleepingModel(timeline), bucket_cap_mb=size * _SCALE)
        found[f"torch DDP, {name}"] = partial(step, model)
    return found


def published_table(rounds: int) -> tuple[str, list[TableRow]]:
    """The published steps, their forecasts, and the times measured on the link in one process."""
    timeline = scaled(published_step.timeline(), _SCALE)
    link = published_step.link(timeline.total_bytes)
    lone_rank(2, link)
    forecasts = forecasts_of(timeline, link.wire(2), _SCALE)
    for name, size in BUCKETS_MB.items():  # torch's first bucket is small only without a size
        forecasts[f"torch DDP, {name}"] = bucketed(timeline, link.wire(2), size * _SCALE, first_mb=size * _SCALE)
    compute = partial(step, SleepingModel(timeline))
    samples = interleaved({"compute": compute, **ours(timeline), **torchs(timeline)}, rounds, warm_up=2)
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
        mark = " (fitted)" if name in _FITTED else ""
        rows.append(f"| {name}{mark} | {' | '.join(cells)} | {measured} | {off} |")
    return "\n".join(rows), [in_order(medians), *within(medians)]


def in_order(medians: dict[str, float]) -> TableRow:
    """Whether the groups of the published table come in its order. A group tied there may be a little quicker."""
    must, measured, holds = "", [], True
    for slow, quick in pairwise(_SLOWEST_FIRST):
        tied = _lead(published_step.PUBLISHED, slow, quick) <= _TIED
        lead = _lead(medians, slow, quick)
        must += f"{_in_braces(slow)} {'≳' if tied else '>'} "
        measured.append(f"{lead:+.1%}")
        holds = holds and (lead >= -_TIED if tied else lead > 0)
    must += f"{_in_braces(_SLOWEST_FIRST[-1])} (≳: tied there, −{100 * _TIED:.0f} % is enough)"
    return TableRow("published table: order of its groups", must, "each to the next: " + ", ".join(measured), holds)


def _lead(times: dict[str, float], slow: list[str], quick: list[str]) -> float:
    """How much slower the quickest of the slow group is than the slowest of the quick group."""
    return min(times[name] for name in slow) / max(times[name] for name in quick) - 1


def _in_braces(group: list[str]) -> str:
    return "{" + ", ".join(group) + "}"


def within(medians: dict[str, float]) -> list[TableRow]:
    """The error of the worst row, of those that were fitted and of those that are forecasts."""
    off = {name: medians[name] / published - 1 for name, published in published_step.PUBLISHED.items()}
    rows = []
    for kind in ("fitted", "forecast"):
        names = [name for name in off if (name in _FITTED) == (kind == "fitted")]
        worst = max(names, key=lambda name: abs(off[name]))
        what = f"published table: ms of the {len(names)} {kind} rows"
        rows.append(TableRow(what, "within 10 %", f"{off[worst]:+.1%} at worst ({worst})", abs(off[worst]) <= 0.10))
    return rows


def hidden(rounds: int, backward: float = 0.6) -> list[TableRow]:
    """An overlapped step in units of its compute plus the last transfer, where all else can be hidden.

    `backward`: its seconds; a forward takes half of them, and the gradients are on the wire for three quarters.
    """
    timeline = Backward.in_proportion(48 * [2**16], backward, backward / 2)
    group = lone_rank(2, Link(1e-4, 0.75 * backward / timeline.total_bytes))
    wrapped = {
        "OverlappedDDP": OverlappedDDP(SleepingModel(timeline)),
        "BucketedDDP": BucketedDDP(SleepingModel(timeline), 0.25),
        "torch DDP": DistributedDataParallel(SleepingModel(timeline), bucket_cap_mb=0.25),
    }
    variants = {name: partial(step, model) for name, model in wrapped.items()}
    last = {name: last_transfer(run, group) for name, run in variants.items()}
    samples = interleaved({"compute": partial(step, SleepingModel(timeline)), **variants}, rounds)
    dist.destroy_process_group()
    rows = []
    for name, seconds in last.items():
        pairs = zip(samples[name], samples["compute"], strict=True)
        found = median(each.wall / (compute.wall + seconds) for each, compute in pairs)
        reported = name.startswith("torch")
        target = REPORTED if reported else "≤ 1.03"
        what = f"step / (compute + last transfer), {name}"
        rows.append(TableRow(what, target, f"{found:.3f}", reported or found <= 1.03))
    return rows


def last_transfer(run: Callable[[], object], group: LinkedGroup) -> float:
    """Seconds for which the last gradients of a step are on the wire."""
    run()  # torch's DDP rebuilds its buckets in the first step
    group.transfers.clear()
    run()
    largest = max(each.nbytes for each in group.transfers)
    gradients = [each for each in group.transfers if 4 * each.nbytes >= largest]  # without the small messages of checks
    return gradients[-1].ended - gradients[-1].started


_WITHIN = 1.08  # a step of a split model may take so many times its forecast

Taken = dict[str, dict[str, list[float]]]  # link -> way -> seconds of each step


def two_gpus(rounds: int, seconds: float = 1.0) -> tuple[str, list[TableRow]]:
    """One model on two ranks under data, tensor and pipeline parallelism, on four links, against the forecasts.

    `seconds`: how long each step takes here.
    """

    def on_ranks() -> Taken:
        group = linked_group(None)
        return {link: split_model.measure_ways(link, group, rounds, seconds) for link in split_model.LINKS}

    return judge_split(run_ranks(2, on_ranks, timeout=60 + 40 * rounds)[0])


def judge_split(taken: Taken) -> tuple[str, list[TableRow]]:
    """A table of medians with the forecasts, and a row for each way: how far its worst link is from the forecast."""
    forecasts = {link: split_model.forecasts(PRESETS[link]) for link in taken}
    ways = list(next(iter(taken.values())))
    lines = [f"Measured (forecast) ms of a step on two GPUs; on one: {1e3 * split_model.ALONE:.1f}.", ""]
    lines += [f"| | {' | '.join(ways)} |", "|---" * (len(ways) + 1) + "|"]
    for link, steps in taken.items():
        cells = [f"{1e3 * median(steps[way]):.1f} ({1e3 * forecasts[link][way]:.1f})" for way in ways]
        lines.append(f"| {link} | {' | '.join(cells)} |")
    rows = []
    for way in ways:
        ratios = {link: median(steps[way]) / forecasts[link][way] for link, steps in taken.items()}
        worst = max(ratios, key=ratios.__getitem__)
        measured = f"{ratios[worst]:.3f} at worst ({worst})"
        rows.append(
            TableRow(f"a split model's step / forecast, {way}", f"≤ {_WITHIN}", measured, ratios[worst] <= _WITHIN)
        )
    return "\n".join(lines), rows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=positive_count, default=5, help="timed steps of each strategy (default: 5)")
    parser.add_argument("--transfers", type=positive_count, default=20, help="transfers of each length (default: 20)")


def main(options: argparse.Namespace) -> int:
    print(f"The simulated link on {machine()}.\n", flush=True)
    torch.set_num_threads(1)
    on_the_link = exactness_rows(options.transfers)
    table, rows = published_table(options.rounds)
    ways, split_rows = two_gpus(options.rounds)
    return report(
        [*on_the_link, *rows, *hidden(options.rounds), *split_rows], before=f"{table}\n\n{ways}", after=_LEGEND
    )
