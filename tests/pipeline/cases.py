"""Models for pipelines, one process that computes the same, and schedules by name."""

import copy
from collections.abc import Callable

import torch
from torch import nn

from scratch_ddp.pipeline import Pipeline
from scratch_ddp.pipeline.schedules import Schedule

WIDTH = 6


class Block(nn.Module):
    """Two linear layers and a norm: weights with a bias and without, and parameters that are no linear layer's."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def build(blocks: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(blocks))).double()


def batch(items: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(items, 3, WIDTH, generator=generator, dtype=torch.float64)
    return x, torch.randn(items, 3, WIDTH, generator=generator, dtype=torch.float64)


def alone(model: nn.Module, x: torch.Tensor, y: torch.Tensor, loss: Callable = nn.functional.mse_loss) -> float:
    """One process: adds the gradients of the whole batch and returns the loss."""
    found = loss(model(x), y)
    found.backward()
    return found.item()


def distance(pipeline: Pipeline, whole: nn.Module) -> float:
    """The largest difference of this rank's gradients to one process', relative to the largest gradient."""
    expected = {name: each.grad for name, each in whole.named_parameters(remove_duplicate=False)}
    pairs = [(each.grad, expected[name]) for name, each in pipeline.named_parameters()]
    assert all((mine is None) == (its is None) for mine, its in pairs)
    differences = [((mine - its).abs().max() / its.abs().max()).item() for mine, its in pairs if its is not None]
    return max(differences, default=0.0)


def pipeline_of(model: nn.Module, m: int, schedule: str | Schedule = "1f1b", **settings) -> Pipeline:
    return Pipeline(copy.deepcopy(model), m, schedule, nn.functional.mse_loss, **settings)
