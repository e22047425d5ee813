"""Strategies that work from gradient hooks: whatever a step looks like, they do what the simple one does after it."""

import contextlib
import functools

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


def step(wrapped, names="abcd", scale=None):
    if names:
        wrapped(names, scale or rank() + 1.0).backward()
    wrapped.sync_gradients()


def other_order_on_rank_1(wrapped):
    step(wrapped, ["abcd", "dcba", "bdac"][rank()])


def unused_on_rank_1(wrapped):
    step(wrapped, "abcd" if rank() != 1 else "bd")


def no_backward_on_rank_1(wrapped):
    step(wrapped, "abcd" if rank() != 1 else "")


def twice_before_sync(wrapped):
    losses = wrapped("abcd", rank() + 1.0), wrapped("bc", 3.0)
    for loss in losses:
        loss.backward()
    wrapped.sync_gradients()


def forward_and_backward_twice(wrapped):
    for scale in (rank() + 1.0, 3.0, 2.0):
        wrapped("abcd" if scale == 3.0 else "bc", scale).backward()
    wrapped.sync_gradients()


def forward_and_backward_twice_on_rank_1(wrapped):
    for _ in range(1 + (rank() == 1)):
        wrapped("abcd", rank() + 1.0).backward()
    with wrapped.no_sync():
        wrapped("ab", 3.0).backward()
    wrapped.sync_gradients()


def thrown_away_on_every_rank(wrapped):
    wrapped("abcd", float("nan")).backward()
    wrapped.zero_grad()
    step(wrapped, "abc")


def the_same_graph_twice(wrapped):
    loss = wrapped("abcd", rank() + 1.0)
    loss.backward(retain_graph=True)
    loss.backward()
    wrapped.sync_gradients()


def last_micro_batch_uses_less(wrapped):
    with wrapped.no_sync():
        step(wrapped, "abcd")
    step(wrapped, "b" if rank() else "c", 2.0)


def synchronised_outside_what_ran_inside_no_sync(wrapped):
    with wrapped.no_sync():
        wrapped("abc", rank() + 1.0).backward()
    wrapped.sync_gradients()


def not_zeroed(wrapped):
    for names in ("abcd", "bc", "cd"):
        step(wrapped, names)


def accumulated_after_zeroing_in_place(wrapped):
    step(wrapped)
    wrapped.zero_grad(set_to_none=False)
    with wrapped.no_sync():
        step(wrapped, "abc")
    step(wrapped, "bcd")


def frozen_later(wrapped, zeroed):
    step(wrapped)
    if zeroed:
        wrapped.zero_grad()
    wrapped.module.layers["c"].requires_grad_(False)
    step(wrapped)


def frozen_with_a_gradient_of_the_rank_s_own(wrapped):
    with wrapped.no_sync():
        step(wrapped)
    wrapped.module.layers["c"].requires_grad_(False)
    step(wrapped)


def unfrozen_later(wrapped):
    frozen_later(wrapped, zeroed=True)
    wrapped.zero_grad()
    wrapped.module.layers["c"].requires_grad_(True)
    step(wrapped)


def unfrozen_between_two_backwards(wrapped):
    layer = wrapped.module.layers["c"].requires_grad_(False)
    wrapped("abcd", rank() + 1.0).backward()
    layer.requires_grad_(True)
    wrapped.module("bc", rank() + 2.0).backward()
    wrapped.sync_gradients()


def frozen_when_it_was_wrapped(wrapped):
    for layer in ("a", "d"):
        step(wrapped)
        wrapped.module.layers[layer].requires_grad_(True)
    step(wrapped)


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


SCENARIOS = [
    *(other_order_on_rank_1, unused_on_rank_1, no_backward_on_rank_1, twice_before_sync, the_same_graph_twice),
    *(forward_and_backward_twice, forward_and_backward_twice_on_rank_1, thrown_away_on_every_rank),
    *(last_micro_batch_uses_less, synchronised_outside_what_ran_inside_no_sync, not_zeroed),
    *(accumulated_after_zeroing_in_place, frozen_with_a_gradient_of_the_rank_s_own, unfrozen_later),
    *(unfrozen_between_two_backwards, frozen_when_it_was_wrapped, clipped_and_stepped),
    *(functools.partial(frozen_later, zeroed=zeroed) for zeroed in (True, False)),
    *(functools.partial(recomputed, reentrant=reentrant) for reentrant in (True, False)),
]


def each_scenario(strategy) -> None:
    for scenario in SCENARIOS:
        expected, mine = model(), model()
        for each in (expected, mine):
            for name in "ad" if scenario is frozen_when_it_was_wrapped else "":
                each.layers[name].requires_grad_(False)
        scenario(SimpleDistributedDataParallelism(expected))
        scenario(strategy(mine))
        for (name, a), b in zip(mine.named_parameters(), expected.parameters(), strict=True):
            about = f"{scenario}: {name} on rank {rank()}"
            assert (a.grad is None) == (b.grad is None), about
            if a.grad is not None:
                torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=1e-12, msg=lambda text, at=about: at + text)
        alike = 3 if scenario is frozen_with_a_gradient_of_the_rank_s_own else 1
        assert len(set(gathered(bits(mine)))) == alike, f"{scenario}: ranks have different bits"


@hooked
def test_the_same_as_the_simple_strategy(strategy):
    run_ranks(3, each_scenario, strategy, timeout=60)


def without_a_call(strategy) -> None:
    """`sync="backward"`: a step of one backward, one that accumulates under no_sync, and one of two backwards."""
    expected, mine = SimpleDistributedDataParallelism(model()), strategy(model(), sync="backward")
    for wrapped in (expected, mine):
        optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.01)
        for quiet in (["ab"], ["abc", "bcd"], ["a", "abcd"]):
            for names in quiet:
                inside = len(quiet) > 1 and names is quiet[0] and quiet[0] == "abc"
                with wrapped.no_sync() if inside else contextlib.nullcontext():
                    wrapped(names, rank() + 1.0).backward()
                    if wrapped is expected:
                        wrapped.sync_gradients()
            optimizer.step()
            optimizer.zero_grad()
    for a, b in zip(mine.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@hooked
def test_synchronised_at_the_end_of_backward(strategy):
    run_ranks(2, without_a_call, strategy)
