"""The models that the class under trial wraps, and what one process would compute with them."""

import torch
import torch.distributed as dist
from torch import nn

ROWS = 4  # of a batch, on each rank


class Tied(nn.Module):
    """Two layers with one weight, a norm, and a buffer."""

    def __init__(self, dtype: torch.dtype = torch.float64):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.rand(6) + 0.5)
        self.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.norm(torch.tanh(self.first(x)) * self.scale))


class Tower(nn.Module):
    """40 layers, 3.9 MiB of parameters: many small ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(160, 160) for _ in range(40)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Heads(nn.Module):
    """Three heads on one layer. A batch uses one of them; the third is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 6)
        self.heads = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.double()

    def forward(self, x: torch.Tensor, head: int = 0) -> torch.Tensor:
        return self.heads[head](torch.tanh(self.body(x)))


def batch(step: int, width: int, dtype: torch.dtype = torch.float64, everyones: bool = False) -> torch.Tensor:
    """This rank's rows of a step, or those of all ranks."""
    generator = torch.Generator().manual_seed(step)
    rows = torch.randn(dist.get_world_size() * ROWS, width, generator=generator, dtype=torch.float64).to(dtype)
    return rows if everyones else rows[dist.get_rank() :: dist.get_world_size()]


def loss_of(output: torch.Tensor) -> torch.Tensor:
    """Means over ranks of means over equally many rows are means over all rows."""
    return (output - 1).square().mean() + output.sin().mean()


def take_step(model: nn.Module) -> None:
    """A step of plain SGD, then no gradients. (torch's optimizers would import its compiler: two seconds.)"""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= 0.1 * parameter.grad
    model.zero_grad()


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: each.grad if each.grad is None else each.grad.clone() for name, each in model.named_parameters()}


def anywhere(complaint: str, group: dist.ProcessGroup) -> bool:
    """Whether any rank has a complaint: then all of them stop."""
    found = torch.tensor(float(bool(complaint)))
    dist.all_reduce(found, group=group)
    return bool(found)


def mean_of_ranks(model: nn.Module, group: dist.ProcessGroup) -> dict[str, torch.Tensor | None]:
    """The mean of the gradients that the ranks have; one that is missing counts as zero, and None where all are."""
    means = {}
    for name, parameter in model.named_parameters():
        here = torch.tensor(float(parameter.grad is not None))
        mean = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad / dist.get_world_size()
        dist.all_reduce(here, group=group)
        dist.all_reduce(mean, group=group)
        means[name] = mean.detach() if here else None
    return means


def difference(actual: dict[str, torch.Tensor | None], expected: dict[str, torch.Tensor | None]) -> str:
    """Say which gradient is not the expected one and, where it is a multiple of it, which; or ""."""
    for name, right in expected.items():
        mine = actual[name]
        if mine is None and right is None:
            continue
        if mine is None:
            return f"the gradient of {name} is None, although a rank has used it"
        if right is None:
            return f"{name} has a gradient, although no rank has used it: leave it None"
        if not torch.allclose(mine, right, rtol=1e-6, atol=1e-10):
            factor = ((mine * right).sum() / right.square().sum()).item()
            if torch.allclose(mine, factor * right, rtol=1e-6, atol=1e-10):
                return f"the gradient of {name} is {factor:.4g} times the mean over the ranks"
            return f"the gradient of {name} is not the mean over the ranks"
    return ""
