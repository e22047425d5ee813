"""Models that sharding must get right beside those of `tests.ddp.cases`."""

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

from tests.ddp.cases import CASES as REPLICATED_CASES
from tests.ddp.cases import Case, Made, linear


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
        self.blocks, self.order = nn.ModuleList(linear(3)), order

    def forward(self, x):
        for i in self.order:
            x = torch.tanh(self.blocks[i](x))
        return x


def with_head(*blocks: nn.Module) -> nn.Module:
    """A layer outside of every unit, before and after them, so that the first unit's input needs a gradient too."""
    first, last = linear(2)
    return Made(
        lambda self, x: self.last(nn.Sequential(*self.blocks)(self.first(x))), first=first, blocks=[*blocks], last=last
    )


def recurrent() -> nn.Module:
    """Modules that keep lists of their parameters of their own; a sequence of one step."""
    return Made(
        lambda self, x: self.layers[1](self.layers[0](x[None])[0])[0][0], layers=[nn.LSTM(6, 6) for _ in range(2)]
    )


def adapter() -> nn.Module:
    """A frozen layer beside a trained one: its weight is needed in backward after the last gradient has come."""
    base, down, up = nn.Linear(6, 6).requires_grad_(False), nn.Linear(6, 2), nn.Linear(2, 6)
    return Made(lambda self, x: self.base(x) + self.up(self.down(x)), base=base, down=down, up=up)


def frozen_unit() -> nn.Module:
    model = with_head(*linear(3))
    model.blocks[1].requires_grad_(False)
    return model


class Result:
    """A class of the model's own, of which torch's pytree knows nothing."""

    __slots__ = ("__dict__", "hidden")

    def __init__(self, hidden, others):
        self.hidden, self.others = hidden, others


def structured() -> nn.Module:
    """Tensors in keyword arguments, dicts and an object; the first layer's output is used by all blocks."""

    def block(self, x, *, memory):
        y = torch.tanh(self.layer(x + memory["first"]))
        return Result(y, {"twice": [2 * y]})

    def forward(self, x):
        memory = {"first": self.first(x)}
        for each in self.blocks:
            result = each(x, memory=memory)
            x = result.hidden + result.others["twice"][0]
        return x

    first, *layers = linear(4)
    return Made(forward, first=first, blocks=[Made(block, layer=layer) for layer in layers])


def in_place() -> nn.Module:
    """Blocks that write to their inputs."""
    return with_head(*(Made(lambda self, x: self.layer(x.relu_()), layer=layer) for layer in linear(2)))


def shown() -> nn.Module:
    """The model returns a parameter of its own, also in an object, and a unit a view of one."""
    places = Made(lambda self, x: self.weight[: len(x)], weight=nn.Parameter(torch.randn(9, 6)))
    return Made(
        lambda self, x: (self.units[1](x) + self.units[0](x), self.scale, Result(self.scale, None)),
        units=[places, nn.Linear(6, 6)],
        scale=nn.Parameter(torch.ones(6)),
    )


def scaled_loss(model, x, y):
    output, scale, result = model(x)
    return mse_loss(output * scale * result.hidden, y)


def written_views() -> nn.Module:
    """Outputs that are views, since a linear layer's input has three dimensions, and are written to in place."""
    layers = (nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 6))
    return nn.Sequential(nn.Unflatten(0, (2, -1)), *layers, nn.Flatten(0, 1))


def segments(reentrant: bool) -> nn.Module:
    """Two blocks a segment of activation checkpointing."""

    def forward(self, x):
        x = self.first(x)
        for pair in (self.blocks[:2], self.blocks[2:]):
            x = checkpoint(nn.Sequential(pair[0], nn.Tanh(), pair[1]), x, use_reentrant=reentrant)
        return x

    first, *blocks = linear(5)
    return Made(forward, first=first, blocks=blocks)


class Kept(nn.Module):
    """Losses stay in the module; that in a list needs no parameter in backward."""

    def __init__(self):
        super().__init__()
        self.layer, self.gate = linear(2)

    def forward(self, x):
        y = torch.tanh(self.layer(x))
        self.losses = [self.gate(x.detach()).square().mean()]
        self.loss = self.gate(torch.tanh(self.gate(x))).square().mean()  # later than y, so its backward comes earlier
        return y


def kept_loss(model, x, y):
    model(x)
    return sum(each.loss for each in getattr(model, "module", model))


def listed_loss(model, x, y):
    model(x)
    return sum(each.losses[0] for each in getattr(model, "module", model))


def cached() -> nn.Module:
    """Blocks that write to what they are given: an object with the tensors of an earlier call, a list, and a dict."""

    def block(self, x, cache, losses, *, seen):
        new = torch.tanh(self.key(x) * self.scale)
        cache.hidden[self.number] = [*cache.hidden.get(self.number, ()), new]
        y = torch.tanh(self.value(x) + sum(cache.hidden[self.number]))
        losses.append(y.square().mean())
        seen[self.number] = seen.pop("last", 0) + y
        seen["last"] = y
        return y

    def forward(self, x, cache):
        losses, seen, x = [], {}, self.first(x)
        for each in self.blocks:
            x = each(x, cache, losses, seen=seen)
        return sum(seen.values()), sum(losses)

    first, *layers = linear(7)
    parts = zip(layers[::2], layers[1::2], strict=True)
    blocks = [Made(block, key=key, value=value, scale=nn.Parameter(torch.ones(6))) for key, value in parts]
    for number, each in enumerate(blocks):
        each.number = number
    return Made(forward, first=first, blocks=blocks)


def cached_loss(model, x, y):
    cache = Result({}, None)
    model(x.flip(1), cache)
    output, loss = model(x, cache)
    return mse_loss(output, y) + loss


def whole_checkpointed(model, x, y):
    return mse_loss(checkpoint(model, x, use_reentrant=False), y)


CASES = REPLICATED_CASES | {
    "tiny parameters": Case(Tiny),
    "another order": Case(lambda: Chain(2, 0, 1)),
    "a unit twice": Case(lambda: Chain(0, 1, 0, 2, 1)),
    "LSTM": Case(recurrent),
    "adapters": Case(lambda: with_head(adapter(), adapter())),
    "a frozen unit": Case(frozen_unit),
    "structured": Case(structured),
    "in place": Case(in_place),
    "a parameter is returned": Case(shown, scaled_loss, whole_batch=False),
    "views written to": Case(written_views),
    "segments": Case(lambda: segments(False)),
    "reentrant segments": Case(lambda: segments(True)),
    "a loss kept in a unit": Case(lambda: nn.Sequential(Kept(), Kept()), kept_loss),
    "a loss in a list": Case(lambda: nn.Sequential(Kept(), Kept()), listed_loss),
    "caches": Case(cached, cached_loss),
    "all recomputed": Case(lambda: Chain(0, 1, 2), whole_checkpointed),
}
