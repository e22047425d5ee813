"""Strategies that work from gradient hooks: whatever a step looks like, they do what the simple one does after it."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from scratch_ddp.ddp import SimpleDistributedDataParallelism
from tests.ddp.cases import HOOKED, bits, gathered
from tests.ranks import run_ranks

hooked = pytest.mark.parametrize("strategy", HOOKED.values(), ids=HOOKED)


class Heads(nn.Module):
    """Layers of different sizes side by side; which are used, in which order, is said at each call."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(n, n) for n, name in enumerate("abcd", start=2)})

    def forward(self, names: str, scale: float | torch.Tensor = 1.0) -> torch.Tensor:
        layers = [self.layers[name] for name in names]
        return sum(layer(scale * torch.ones(3, layer.in_features).double()).tanh().sum() for layer in layers)


def model() -> nn.Module:
    torch.manual_seed(0)
    return Heads().double()


def rank() -> int:
    return dist.get_rank()


def back(wrapped, names="abcd", scale=None, **options):
    wrapped(names, scale or rank() + 1.0).backward(**options)


def step(wrapped, names="abcd", scale=None):
    if names:
        back(wrapped, names, scale)
    wrapped.sync_gradients()


def quiet(wrapped, names="abcd", scale=None):
    with wrapped.no_sync():
        step(wrapped, names, scale)


def freeze(wrapped, name="c", frozen=True):
    wrapped.module.layers[name].requires_grad_(not frozen)


def two_forwards(wrapped):
    losses = wrapped("abcd", rank() + 1.0), wrapped("bc", 3.0)
    for loss in losses:
        loss.backward()
    wrapped.sync_gradients()


def the_same_graph_twice(wrapped):
    loss = wrapped("abcd", rank() + 1.0)
    loss.backward(retain_graph=True)
    loss.backward()
    wrapped.sync_gradients()


def clipped_and_stepped(wrapped):
    optimizer = torch.optim.Adam(wrapped.parameters())
    for _ in range(3):
        step(wrapped)
        nn.utils.clip_grad_norm_(wrapped.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    step(wrapped)


def recomputed(wrapped, reentrant):
    """The wrapper itself is what is recomputed, twice in one backward: each parameter's gradient arrives twice."""
    for _ in range(2):
        scale = torch.tensor(rank() + 1.0, requires_grad=True)
        first = checkpoint(wrapped, "abc", scale, use_reentrant=reentrant)
        second = checkpoint(wrapped, "bcd", scale * 2, use_reentrant=reentrant)
        (first + second).backward()
        wrapped.sync_gradients()


OWN, FROZEN_FIRST = "frozen with a gradient of the rank's own", "frozen when it was wrapped"
SCENARIOS = {  # the calls of each, in order
    "another order on rank 1": lambda w: step(w, ["abcd", "dcba", "bdac"][rank()]),
    "unused on rank 1": lambda w: step(w, "abcd" if rank() != 1 else "bd"),
    "no backward on rank 1": lambda w: step(w, "abcd" if rank() != 1 else ""),
    "two forwards, two backwards": two_forwards,
    "the same graph twice": the_same_graph_twice,
    "backward three times": lambda w: (back(w, "bc"), back(w, "abcd", 3.0), back(w, "bc", 2.0), w.sync_gradients()),
    "backward twice on rank 1": lambda w: (
        *(back(w) for _ in range(1 + (rank() == 1))),
        quiet(w, "ab", 3.0),
        w.sync_gradients(),
    ),
    "thrown away on every rank": lambda w: (back(w, scale=float("nan")), w.zero_grad(), step(w, "abc")),
    "the last micro-batch uses less": lambda w: (quiet(w), step(w, "b" if rank() else "c", 2.0)),
    "synchronised outside of no_sync": lambda w: (quiet(w, "abc"), w.sync_gradients()),
    "not zeroed": lambda w: [step(w, names) for names in ("abcd", "bc", "cd")],
    "zeroed in place": lambda w: (step(w), w.zero_grad(set_to_none=False), quiet(w, "abc"), step(w, "bcd")),
    "frozen later": lambda w: (step(w), w.zero_grad(), freeze(w), step(w)),
    "frozen later with its gradient left": lambda w: (step(w), freeze(w), step(w)),
    OWN: lambda w: (quiet(w), freeze(w), step(w)),
    "unfrozen later": lambda w: (freeze(w), step(w), w.zero_grad(), freeze(w, frozen=False), step(w)),
    "unfrozen between two backwards": lambda w: (
        *(freeze(w), back(w), freeze(w, frozen=False)),
        *(back(w.module, "bc", rank() + 2.0), w.sync_gradients()),
    ),
    FROZEN_FIRST: lambda w: (step(w), freeze(w, "a", False), step(w), freeze(w, "d", False), step(w)),
    "clipped and stepped": clipped_and_stepped,
    "recomputed, reentrant": lambda w: recomputed(w, True),
    "recomputed": lambda w: recomputed(w, False),
}


def each_scenario(strategy) -> None:
    for about, scenario in SCENARIOS.items():
        expected, mine = model(), model()
        for each in (expected, mine):
            for name in "ad" if about == FROZEN_FIRST else "":
                each.layers[name].requires_grad_(False)
        scenario(SimpleDistributedDataParallelism(expected))
        scenario(strategy(mine))
        for (name, a), b in zip(mine.named_parameters(), expected.parameters(), strict=True):
            told = f"{about}: {name} on rank {rank()}"
            assert (a.grad is None) == (b.grad is None), told
            if a.grad is not None:
                torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=1e-12, msg=lambda text, at=told: at + text)
        assert len(set(gathered(bits(mine)))) == (3 if about == OWN else 1), f"{about}: ranks have different bits"


@hooked
def test_the_same_as_the_simple_strategy(strategy):
    run_ranks(3, each_scenario, strategy, timeout=60)
