"""The FSDP to read, with models that are less well-behaved: it trains them as one process does, or refuses them."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.minimal.fsdp import FSDP
from tests.ranks import in_turn, run_ranks


class Attention(nn.Module):
    """Like a library's block: optional, keyword-only and plain arguments, and several outputs."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x, mask=None, power=1, *, memory):
        hidden = torch.tanh(self.inner(x + memory["last"])) ** power
        return x + self.outer(hidden if mask is None else hidden * mask), {"last": hidden[:, :4], "mask": mask}


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.start, self.end = nn.Linear(4, 4), nn.Linear(4, 2)
        self.blocks = nn.ModuleList(Attention() for _ in range(3))

    def forward(self, x, *, mask=None):
        x, memory = self.start(x), {"last": x}
        for power, block in enumerate(self.blocks, 1):
            x, memory = block(x, mask if power == 2 else None, power, memory=memory)
        return {"prediction": self.end(x), "memory": memory["last"]}


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = nn.Linear(4, 4)

    def forward(self, x):
        return torch.tanh(self.block(torch.tanh(self.block(x))))


def layers():
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4), nn.Linear(4, 2))


def freeze(module):
    return module.requires_grad_(False)


CASES = {  # how to build a model, and what its units are
    "a unit and a root without parameters": (layers, lambda model: list(model)),
    "only the root": (layers, lambda model: []),
    "only one unit": (layers, lambda model: [model]),
    "None, numbers, keywords and several outputs": (Reader, lambda model: model.blocks),
    "a unit that is called twice": (Twice, lambda model: [model.block]),
    "frozen units": (layers, lambda model: [freeze(model[0]), freeze(model[3])]),
    "a frozen root": (layers, lambda model: [model[2], freeze(model)[3].requires_grad_()]),
}


def built(case):
    build, units_of = CASES[case]
    torch.manual_seed(0)
    model = build().double()
    return model, units_of(model)


def train(model, share=slice(None), steps=5):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(steps):
        x = torch.randn(12, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)[share]
        optimizer.zero_grad()
        loss_of(model, x).backward()
        optimizer.step()


def loss_of(model, x):
    options = {"mask": x.new_full((6,), 0.5)} if Reader in map(type, model.modules()) else {}
    output = model(x, **options)
    return sum(each.square().sum(1).mean() for each in (output.values() if options else [output]))


def compare(case):
    (model, units), (alone, _) = built(case), built(case)
    model = FSDP(model, units=units)
    train(model, slice(dist.get_rank(), None, dist.get_world_size()))
    train(alone)
    assert not any(unit.whole.untyped_storage().size() for unit in model.units)  # after backward all is freed
    for unit in model.units:
        unit.gather()
    for mine, right in zip(model.module.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.detach(), right.detach(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("world_size", [2, 3])
def test_it_trains_as_one_process(world_size):
    in_turn(world_size, compare, [(case,) for case in CASES])


def late_backward(model):
    """A forward before a step that has no backward, and a backward that comes late."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x = torch.ones(3, 4, dtype=torch.float64)
    first = model(x)
    second = model(x)  # its backward comes when that of the first has freed everything
    first.sum().backward()
    second.sum().backward()
    model(x)
    optimizer.step()
    return model(x).detach()


def values_of_now(units):
    """No forward computes with values from before a step."""
    model = built("only the root")[0]
    mine = late_backward(FSDP(model, units=[model[index] for index in units]))
    torch.testing.assert_close(mine, late_backward(built("only the root")[0]))


def test_a_backward_that_comes_late():
    in_turn(2, values_of_now, [([],), ([0, 3],)])


def test_what_is_left_out_is_refused():
    class Output:
        def __init__(self, tensor):
            self.tensor = tensor

    class Wraps(nn.Linear):
        def forward(self, x):
            return Output(super().forward(x))

    def refused():
        x = torch.ones(3, 4)
        model = layers()
        model[0].bias.requires_grad_(False)
        with pytest.raises(RuntimeError, match="Only a part of a unit has gradients"):
            FSDP(model, units=[model[0]])(x).sum().backward()
        model = layers()
        with pytest.raises(ValueError, match="belongs to two units"):
            FSDP(model, units=[model, model[0]])
        with pytest.raises(TypeError, match="must return tensors"):
            FSDP(Wraps(4, 4), units=[])(x)
        with torch.no_grad():
            assert FSDP(Wraps(4, 4), units=[])(x).tensor.shape == (3, 4)  # nothing has to be known of its backward

    run_ranks(2, refused)
