"""Models that sharding must get right beside those of `ddp_cases`, and a comparison of sharded and plain models."""

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

from scratch_ddp.fsdp import FSDP
from tests.ddp.cases import CASES as REPLICATED_CASES
from tests.ddp.cases import Case


class Tiny(nn.Module):
    """Parameters with fewer rows than ranks, with rows that can't be shared evenly, and a scalar."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(6, 5), nn.Linear(5, 1), nn.Linear(1, 6)])
        self.scale, self.one = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.ones(1))

    def forward(self, x):
        for block in self.blocks:
            x = block(x) * self.one
        return x * self.scale


class TiedUnits(nn.Module):
    """Two units hold the same weight."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.blocks[2].weight = self.blocks[0].weight

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


class Chain(nn.Module):
    """Blocks that are called in the order of `order`, which may name one twice, or none."""

    def __init__(self, *order: int):
        super().__init__()
        self.blocks, self.order = nn.ModuleList(nn.Linear(6, 6) for _ in range(3)), order

    def forward(self, x):
        for i in self.order:
            x = torch.tanh(self.blocks[i](x))
        return x


class Recurrent(nn.Module):
    """A module that keeps a list of its parameters of its own."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.LSTM(6, 6) for _ in range(2))

    def forward(self, x):
        x = x[None]  # a sequence of one step
        for layer in self.layers:
            x, _ = layer(x)
        return x[0]


class Adapter(nn.Module):
    """A frozen layer beside a trained one: its weight is needed in backward after the last gradient has come."""

    def __init__(self):
        super().__init__()
        self.base, self.down, self.up = nn.Linear(6, 6), nn.Linear(6, 2), nn.Linear(2, 6)
        self.base.requires_grad_(False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class WithHead(nn.Module):
    """A layer outside of every unit, before and after them, so that the first unit's input needs a gradient too."""

    def __init__(self, *blocks: nn.Module):
        super().__init__()
        self.first, self.blocks, self.last = nn.Linear(6, 6), nn.ModuleList(blocks), nn.Linear(6, 6)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Result:
    """A class of the model's own, of which torch's pytree knows nothing."""

    __slots__ = ("__dict__", "hidden")

    def __init__(self, hidden, others):
        self.hidden, self.others = hidden, others


class Structured(nn.Module):
    """Tensors in keyword arguments, dicts and an object; the first block's output is used by all others."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x, *, memory):
            y = torch.tanh(self.layer(x + memory["first"]))
            return Result(y, {"twice": [2 * y]})

    def __init__(self):
        super().__init__()
        self.first, self.blocks = nn.Linear(6, 6), nn.ModuleList(Structured.Block() for _ in range(3))

    def forward(self, x):
        memory = {"first": self.first(x)}
        for block in self.blocks:
            result = block(x, memory=memory)
            x = result.hidden + result.others["twice"][0]
        return x


class InPlace(nn.Module):
    """A block that writes to its input."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x):
            return self.layer(x.relu_())

    def __init__(self):
        super().__init__()
        self.first, self.blocks = nn.Linear(6, 6), nn.ModuleList(InPlace.Block() for _ in range(2))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


class Penalised(nn.Module):
    """A gradient inside of the forward pass."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, x):
        x = x.detach().requires_grad_()
        y = torch.tanh(self.blocks[1](torch.tanh(self.blocks[0](x))))
        (slope,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        return y + slope


class Reentrant(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return x


class Segments(nn.Module):
    """Two blocks a segment of activation checkpointing."""

    def __init__(self, reentrant: bool):
        super().__init__()
        self.first, self.blocks, self.reentrant = (
            nn.Linear(6, 6),
            nn.ModuleList(nn.Linear(6, 6) for _ in range(4)),
            reentrant,
        )

    def forward(self, x):
        x = self.first(x)
        for a, b in (self.blocks[:2], self.blocks[2:]):
            x = checkpoint(lambda x, a=a, b=b: torch.tanh(b(torch.tanh(a(x)))), x, use_reentrant=self.reentrant)
        return x


def whole_checkpointed(model, x, y):
    return mse_loss(checkpoint(model, x, use_reentrant=False), y)


def adapters() -> nn.Module:
    return WithHead(Adapter(), Adapter())


def frozen_unit() -> nn.Module:
    model = WithHead(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6))
    model.blocks[1].requires_grad_(False)
    return model


CASES = REPLICATED_CASES | {
    "tiny parameters": Case(Tiny),
    "tied units": Case(TiedUnits),
    "another order": Case(lambda: Chain(2, 0, 1)),
    "a unit twice": Case(lambda: Chain(0, 1, 0, 2, 1)),
    "an unused unit": Case(lambda: Chain(0, 2)),
    "LSTM": Case(Recurrent),
    "adapters": Case(adapters),
    "a frozen unit": Case(frozen_unit),
    "structured": Case(Structured),
    "in place": Case(InPlace),
    "penalty": Case(Penalised),
    "reentrant checkpointing": Case(Reentrant),
    "segments": Case(lambda: Segments(False)),
    "reentrant segments": Case(lambda: Segments(True)),
    "all recomputed": Case(lambda: Chain(0, 1, 2), whole_checkpointed),
}


def assert_equal(mine: FSDP, plain: nn.Module, step: int = 0, atol: float = 1e-12) -> None:
    """Parameters, gradients and buffers are those of the plain model, on every rank."""
    parameters, gradients = mine.gather_full_params(), mine.gather_full_grads()
    assert [name for name, _ in mine.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert list(parameters) == [name for name, _ in plain.named_parameters(remove_duplicate=False)]
    for name, parameter in plain.named_parameters(remove_duplicate=False):
        allowed = atol if parameter.dtype == torch.float64 else max(atol, 1e-6)
        told = f"step {step}: {name}"
        assert (gradients[name] is None) == (parameter.grad is None), f"{told}: {gradients[name]} for {parameter.grad}"
        close = {"rtol": 0, "atol": allowed, "msg": lambda text, told=told: f"{told}: {text}"}
        torch.testing.assert_close(parameters[name], parameter.data, **close)
        if parameter.grad is not None:
            torch.testing.assert_close(gradients[name], parameter.grad, **close)
    for (name, buffer), other in zip(mine.module.named_buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(buffer, other, rtol=0, atol=atol, msg=f"step {step}: {name}")


def message_of(do, errors=(ValueError, RuntimeError, OSError, TypeError)) -> str:
    """What is said where `do` raises one of these errors; it must."""
    try:
        do()
    except errors as error:
        return str(error)
    return "nothing was raised"
