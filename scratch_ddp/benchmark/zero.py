"""ShardedOptimizer: the state that a rank holds, its bits beside AdamW's, its step beside torch's own."""

import argparse
import sys
from functools import partial

import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import AdamW, Optimizer

from scratch_ddp.benchmark import options as step_options
from scratch_ddp.benchmark.options import build_llama
from scratch_ddp.instruments.forked_ranks import run_ranks
from scratch_ddp.instruments.timing import Figure, Sample, interleaved, machine, markdown, ratio
from scratch_ddp.zero import ShardedOptimizer

OURS, TORCHS, PLAIN = "ShardedOptimizer", "ZeroRedundancyOptimizer", "AdamW"
MAKERS = {
    OURS: partial(ShardedOptimizer, optimizer_cls=AdamW, lr=1e-3),
    TORCHS: partial(ZeroRedundancyOptimizer, optimizer_class=AdamW, lr=1e-3),
    PLAIN: partial(AdamW, lr=1e-3),
}
AT_MOST = 1.10  # of the CPU seconds of torch's step


def build(sizes: dict[str, int]) -> tuple[dict[str, nn.Module], dict[str, Optimizer]]:
    """For each optimizer a model of its own with the same random gradients. Collective."""
    models = {name: build_llama(**sizes) for name in MAKERS}
    for model in models.values():
        generator = torch.Generator().manual_seed(0)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
    return models, {name: make(models[name].parameters()) for name, make in MAKERS.items()}


def measure(rounds: int, sizes: dict[str, int]) -> dict[str, list[Sample]]:
    """On each rank: the seconds of each optimizer's step, in turns."""
    _, optimizers = build(sizes)
    return interleaved({name: optimizer.step for name, optimizer in optimizers.items()}, rounds=rounds, warm_up=3)


def shares(sizes: dict[str, int]) -> tuple[int, int, int, bool]:
    """On each rank after two steps: elements of state here and in all, those of the largest parameter, equal bits."""
    models, optimizers = build(sizes)
    for _ in range(2):
        optimizers[OURS].step()
        optimizers[PLAIN].step()
    pairs = zip(models[OURS].parameters(), models[PLAIN].parameters(), strict=True)
    same = all(torch.equal(a.detach().view(torch.int32), b.detach().view(torch.int32)) for a, b in pairs)
    largest = 2 * max(parameter.numel() for parameter in models[PLAIN].parameters())
    return _elements(optimizers[OURS]), _elements(optimizers[PLAIN]), largest, same


def _elements(optimizer: Optimizer) -> int:
    return sum(value.numel() for entry in optimizer.state.values() for value in entry.values() if value.dim())


def state_figures(reports: list[tuple[int, int, int, bool]]) -> list[Figure]:
    """How far a rank's state is from 1/n of the whole, and whether the weights are those of one process."""
    n, (_, whole, largest, _) = len(reports), reports[0]
    furthest = max(abs(mine - whole / n) for mine, *_ in reports)
    said = f"{furthest / largest:.3f} of it; {max(mine for mine, *_ in reports) / whole:.4f} of the state at most"
    same = all(equal for *_, equal in reports)
    return [
        Figure(f"state a rank, {n} ranks: distance from 1/n", "≤ the largest parameter's", said, furthest <= largest),
        Figure(f"weights after two steps, {n} ranks", "the bits of AdamW", "the same" if same else "others", same),
    ]


def step_figures(samples: dict[str, list[Sample]]) -> list[Figure]:
    """A step of ours beside torch's, judged by CPU seconds, and beside the plain optimizer's, which is only said."""
    rows = []
    for beside, most in ((TORCHS, AT_MOST), (PLAIN, None)):
        cpu, wall = (ratio(samples[OURS], samples[beside], figure) for figure in ("cpu", "wall"))
        measured = f"{cpu} of the CPU time, {wall} of the time"
        must, holds = (f"≤ {most:.2f}", cpu.median <= most) if most else ("", True)
        rows.append(Figure(f"{OURS} / {beside}, a step", must, measured, holds))
    return rows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    step_options.add_arguments(parser, rounds=20)


def main(options: argparse.Namespace) -> int:
    if problem := step_options.problem(options):
        print(problem, file=sys.stderr)
        return 2
    print(f"AdamW on a Llama of 16 M parameters, gloo, {machine()}.\n", flush=True)
    step_options.import_early()

    rows = []
    for n in (2, 3, 4):
        rows += state_figures(run_ranks(n, shares, {}, timeout=120))
    rows += step_figures(run_ranks(options.ranks, measure, options.rounds, {}, timeout=60 + 10.0 * options.rounds)[0])
    print(markdown(rows))
    return 0 if all(row.holds for row in rows) else 1
