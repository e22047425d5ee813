"""Wrappers that work in backward: whatever a step looks like, they do what the simple strategy does after it."""

import contextlib
import functools

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from scratch_ddp.ddp import SimpleDistributedDataParallelism
from scratch_ddp.fsdp import FSDP
from tests.ddp.cases import HOOKED, assert_equal, bits, gathered
from tests.ranks import in_turn

SHARDED = functools.partial(FSDP, units=[nn.Linear])


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
    back(wrapped, names, scale)
    wrapped.sync_gradients()


def quiet(wrapped, names="abcd", scale=None):
    with wrapped.no_sync():
        step(wrapped, names, scale)


def freeze(wrapped, name="c", frozen=True):
    wrapped.module.layers[name].requires_grad_(not frozen)


def two_forwards(wrapped):
    first, second = wrapped("abcd", rank() + 1.0), wrapped("bc", 3.0)
    second.backward()
    first.backward()
    wrapped.sync_gradients()


def thrown_away(wrapped, under_no_sync, late):
    """A batch whose gradients are NaN; `late`: it is thrown away after the next forward pass only."""
    step(wrapped)
    wrapped.zero_grad()
    with wrapped.no_sync() if under_no_sync else contextlib.nullcontext():
        back(wrapped, scale=float("nan"))
    if not late:
        wrapped.zero_grad()
    loss = wrapped("abc")
    if late:
        wrapped.zero_grad()
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
TWICE, LATE, ALL = "backward twice on rank 1", "thrown away late", "all thrown away"
SCENARIOS = {  # the calls of each, in order
    "another order on rank 1": lambda w: step(w, ["abcd", "dcba", "bdac"][rank()]),
    "unused on rank 1": lambda w: step(w, "abcd" if rank() != 1 else "bd"),
    "no backward on rank 1": lambda w: (back(w) if rank() != 1 else w("abcd"), w.sync_gradients()),
    "two forwards, two backwards": two_forwards,
    "the same graph twice": the_same_graph_twice,
    "backward three times": lambda w: (back(w, "bc"), back(w, "abcd", 3.0), back(w, "bc", 2.0), w.sync_gradients()),
    TWICE: lambda w: (
        *(back(w) for _ in range(1 + (rank() == 1))),
        quiet(w, "ab", 3.0),
        w.sync_gradients(),
    ),
    "thrown away": lambda w: thrown_away(w, under_no_sync=False, late=False),
    LATE: lambda w: thrown_away(w, under_no_sync=False, late=True),
    "thrown away under no_sync": lambda w: thrown_away(w, under_no_sync=True, late=True),
    ALL: lambda w: (back(w), w.zero_grad(), w.sync_gradients()),
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
ONLY = {OWN: HOOKED, TWICE: HOOKED, LATE: [SHARDED], ALL: [SHARDED]}  # what the other classes refuse


def after(about: str, wrap) -> nn.Module:
    wrapped = model()
    for name in "ad" if about == FROZEN_FIRST else "":
        wrapped.layers[name].requires_grad_(False)
    wrapped = wrap(wrapped)
    SCENARIOS[about](wrapped)
    return wrapped


def compare(about: str) -> None:
    simple = after(about, SimpleDistributedDataParallelism)
    for wrap in ONLY.get(about, [*HOOKED, SHARDED]):
        wrapped = after(about, wrap)
        assert_equal(wrapped, simple, f"{wrap} on rank {rank()}")
        if not isinstance(wrapped, FSDP):
            assert len(set(gathered(bits(wrapped.module)))) == (3 if about == OWN else 1), "ranks have different bits"


def test_the_same_as_the_simple_strategy():
    in_turn(3, compare, [(about,) for about in SCENARIOS])
