"""ShardedOptimizer: the state that a rank holds, its weights against AdamW's, its step against torch's own class."""

import argparse
from functools import partial

import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import AdamW, Optimizer

from scratch_ddp.benchmark import steps
from scratch_ddp.benchmark.command import REPORTED, TableRow, cpu_row
from scratch_ddp.instruments.forked_ranks import run_ranks
from scratch_ddp.instruments.timing import Sample, interleaved
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
    models = {name: steps.build_llama(**sizes) for name in MAKERS}
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
    """On each rank after two steps: elements of state here, in all, of the largest parameter; are the bits equal?"""
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


def state_rows(reports: list[tuple[int, int, int, bool]]) -> list[TableRow]:
    """How far a rank's state is from 1/n of the whole, and whether the weights are those of one process."""
    n, (_, whole, largest, _) = len(reports), reports[0]
    furthest = max(abs(mine - whole / n) for mine, *_ in reports)
    measured = f"{furthest / largest:.3f} of it; {max(mine for mine, *_ in reports) / whole:.4f} of the state at most"
    same = all(equal for *_, equal in reports)
    return [
        TableRow(f"state per rank, {n} ranks: off 1/n", "≤ the largest parameter's", measured, furthest <= largest),
        TableRow(f"weights after two steps, {n} ranks", "the bits of AdamW", "the same" if same else "others", same),
    ]


def step_rows(samples: dict[str, list[Sample]]) -> list[TableRow]:
    """A step of ours against torch's, judged by CPU seconds, and against the plain optimizer's, which is reported."""
    return [
        cpu_row(f"{OURS} / {TORCHS}, a step", samples[OURS], samples[TORCHS], f"≤ {AT_MOST:.2f}", AT_MOST),
        cpu_row(f"{OURS} / {PLAIN}, a step", samples[OURS], samples[PLAIN], REPORTED),
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    steps.add_arguments(parser, rounds=20, on_gpus=False)


def main(options: argparse.Namespace) -> int:
    return steps.run(options, "AdamW on a Llama of 16 M parameters", _measure)


def _measure(options: argparse.Namespace, _: str) -> tuple[list[TableRow], str]:
    states = [row for n in (2, 3, 4) for row in state_rows(run_ranks(n, shares, {}, timeout=120))]
    return [*states, *step_rows(steps.sample_on_ranks(options, measure, {}))], ""
