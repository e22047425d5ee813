"""Forecasts of layouts (data × tensor × pipeline) against steps on the simulated link, and against published ones."""

import argparse
from collections.abc import Mapping, Sequence
from statistics import median

import torch
import torch._dynamo  # noqa: F401  FSDP imports it at its first forward, which takes seconds
import torch.distributed as dist

from scratch_ddp.benchmark.command import REPORTED, TableRow, positive_count, report
from scratch_ddp.course.pages import split_model
from scratch_ddp.instruments.cost import CLUSTERS, Layout, flops_per_token, model, rank_memory
from scratch_ddp.instruments.cost.published import GPT_3, LLAMA_3, MEGATRON, TORCHTITAN
from scratch_ddp.instruments.cost.times import tflops_of_device
from scratch_ddp.instruments.forked_ranks import run_ranks
from scratch_ddp.instruments.timing import machine

_RANK_CORRELATION, _MEDIAN_ERROR = 0.95, 0.05
Measured = Mapping[Layout, float]  # seconds of a step


def layouts(devices: int) -> list[Layout]:
    """Every split of so many devices, a pipeline with one or four times as many micro-batches as stages; and ZeRO-3."""
    found = []
    for tp, pp in ((t, p) for t in (1, 2, 4, 8) for p in (1, 2, 4, 8) if devices % (t * p) == 0):
        dp = devices // (tp * pp)
        for m in (1,) if pp == 1 else (pp, 4 * pp):
            if split_model.BATCH % (dp * m) == 0:
                found.append(Layout(dp, tp, pp, split_model.BATCH // (dp * m), m))
        if dp > 1 and pp == 1:
            found.append(Layout(dp, tp, 1, split_model.BATCH // dp, stage="ZeRO-3"))
    return found


def measure(devices: int, layouts: Sequence[Layout], rounds: int) -> dict[Layout, float]:
    """The median step of each layout, on so many ranks."""

    def on_ranks() -> dict[Layout, float]:
        found = {}
        for layout in layouts:
            found[layout] = median(split_model.measure_layout(layout, rounds, least=1.5, each=0.025))
            if dist.get_rank() == 0:
                print(_line(layout, found[layout]), flush=True)
        return found

    return run_ranks(devices, on_ranks, timeout=60 + 60 * rounds * len(layouts))[0]


def _line(layout: Layout, seconds: float) -> str:
    forecast = split_model.forecast(layout)
    return f"| {layout} | {1e3 * forecast:.1f} | {1e3 * seconds:.1f} | {seconds / forecast:.3f} |"


def judge(measured: Measured) -> list[TableRow]:
    """Whether the forecasts put the layouts in order, and how far they are off."""
    forecasts = [split_model.forecast(layout) for layout in measured]
    order = rank_correlation(forecasts, list(measured.values()))
    errors = [abs(forecast / seconds - 1) for forecast, seconds in zip(forecasts, measured.values(), strict=True)]
    what = f"{len(errors)} layouts: rank correlation of forecast and measured step"
    worst = f"{median(errors):.1%} (at worst {max(errors):.1%})"
    return [
        TableRow(what, f"≥ {_RANK_CORRELATION}", f"{order:.3f}", order >= _RANK_CORRELATION),
        TableRow("the same: median error", f"≤ {_MEDIAN_ERROR:.0%}", worst, median(errors) <= _MEDIAN_ERROR),
    ]


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Spearman's: 1 if both put their entries in the same order, −1 if in the reverse one. No ties."""
    n = len(one)
    apart = sum((a - b) ** 2 for a, b in zip(_ranks(one), _ranks(other), strict=True))
    return 1 - 6 * apart / (n * (n * n - 1))


def _ranks(values: Sequence[float]) -> list[int]:
    order = sorted(range(len(values)), key=values.__getitem__)
    return [order.index(place) for place in range(len(values))]


def published_table() -> str:
    """Forecast and published TFLOP/s of a GPU; then DeepSeek-V3's hours, whose layout can't be forecast."""
    lines = ["| | layout | published TFLOP/s | forecast | off | GB of a rank |", "|---|---|---|---|---|---|"]
    for run in (*MEGATRON, *GPT_3, *LLAMA_3, *TORCHTITAN):
        where = run.layout, CLUSTERS[run.cluster], run.sequence
        found = tflops_of_device(run.shape, *where, precision=run.precision)
        held = rank_memory(run.shape, run.layout, run.sequence, run.precision).total / 1e9
        off = f"{found / run.tflops - 1:+.0%}"
        lines.append(f"| {run.shape.name} | {run.layout} | {run.tflops:.0f} | {found:.0f} | {off} | {held:.0f} |")
    return "\n".join([*lines, "", deepseek()])


def deepseek() -> str:
    """What utilisation the hours of DeepSeek-V3's report stand for."""
    hours, tokens = 180_000, 1e12  # DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 1: for 10¹² tokens
    flops = flops_per_token(model("DeepSeek-V3"), 4096) * tokens
    used = flops / CLUSTERS["H100"].device.flops / 3600 / hours  # an H800 computes as much
    return f"DeepSeek-V3: 180,000 hours for 10¹² tokens are {used:.0%} of the peak in bfloat16 (it computes in FP8)."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=positive_count, default=3, help="timed steps of each layout (default: 3)")
    parser.add_argument("--ranks", type=positive_count, nargs="+", default=[2, 4, 8], help="numbers of ranks (2 4 8)")


def main(options: argparse.Namespace) -> int:
    print(f"Layouts on simulated links, on {machine()}.\n", flush=True)
    print("| layout | forecast ms | measured ms | measured / forecast |\n|---|---|---|---|", flush=True)
    torch.set_num_threads(1)
    measured: dict[Layout, float] = {}
    for devices in options.ranks:
        measured |= measure(devices, layouts(devices), options.rounds)
    rows = judge(measured)
    worst = max(
        abs(tflops_of_device(run.shape, run.layout, CLUSTERS[run.cluster], run.sequence) / run.tflops - 1)
        for run in MEGATRON[2:]
    )
    what = "published: TFLOP/s of the eight GPT of 7.5 to 1,008 billion parameters, at worst"
    rows.append(TableRow(what, REPORTED, f"{worst:.0%} off", True))
    return report(rows, before="\n" + published_table())
