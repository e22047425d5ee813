"""Models that sharding must get right beside those of `tests.ddp.cases`."""

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

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


class InPlace(nn.Linear):
    """A block that writes to its input."""

    def forward(self, x):
        return super().forward(x.relu_())


class Shown(nn.Module):
    """The model returns a parameter of its own, and a unit a view of one."""

    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(9, 6))

        def forward(self, x):
            return self.weight[: len(x)]

    def __init__(self):
        super().__init__()
        self.places, self.layer = Shown.Positions(), nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x):
        return self.layer(x) + self.places(x), self.scale


def scaled_loss(model, x, y):
    output, scale = model(x)
    return mse_loss(output * scale, y)


def written_views() -> nn.Module:
    """Outputs that are views, since a linear layer's input has three dimensions, and are written to in place."""
    layers = (nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 6))
    return nn.Sequential(nn.Unflatten(0, (2, -1)), *layers, nn.Flatten(0, 1))


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


class Segments(nn.Module):
    """Two blocks a segment of activation checkpointing."""

    def __init__(self, reentrant: bool):
        super().__init__()
        self.first, self.blocks = nn.Linear(6, 6), nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.reentrant = reentrant

    def forward(self, x):
        x = self.first(x)
        for pair in (self.blocks[:2], self.blocks[2:]):
            x = checkpoint(nn.Sequential(pair[0], nn.Tanh(), pair[1]), x, use_reentrant=self.reentrant)
        return x


def whole_checkpointed(model, x, y):
    return mse_loss(checkpoint(model, x, use_reentrant=False), y)


def tied_units() -> nn.Module:
    model = Chain(0, 1, 2)
    model.blocks[2].weight = model.blocks[0].weight
    return model


def frozen_unit() -> nn.Module:
    model = WithHead(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6))
    model.blocks[1].requires_grad_(False)
    return model


CASES = REPLICATED_CASES | {
    "tiny parameters": Case(Tiny),
    "tied units": Case(tied_units),
    "another order": Case(lambda: Chain(2, 0, 1)),
    "a unit twice": Case(lambda: Chain(0, 1, 0, 2, 1)),
    "LSTM": Case(Recurrent),
    "adapters": Case(lambda: WithHead(Adapter(), Adapter())),
    "a frozen unit": Case(frozen_unit),
    "structured": Case(Structured),
    "in place": Case(lambda: WithHead(InPlace(6, 6), InPlace(6, 6))),
    "a parameter is returned": Case(Shown, scaled_loss, whole_batch=False),
    "views written to": Case(written_views),
    "penalty": Case(Penalised),
    "segments": Case(lambda: Segments(False)),
    "reentrant segments": Case(lambda: Segments(True)),
    "all recomputed": Case(lambda: Chain(0, 1, 2), whole_checkpointed),
}
