"""A layer takes the time that is said, and computes what it would compute."""

import pytest
import torch
from torch import nn

from scratch_ddp.instruments.network.clock import now, take_time


def test_time_passes_and_nothing_changes():
    torch.manual_seed(0)
    layer, inputs = nn.Linear(3, 2), torch.randn(4, 3, requires_grad=True)
    expected = torch.autograd.grad(layer(inputs).square().sum(), [*layer.parameters(), inputs])
    began = now()
    output = take_time(layer(inputs), 0.03, 0.06)
    forward = now() - began
    output.square().sum().backward()
    assert torch.equal(output, layer(inputs))
    assert all(
        torch.equal(mine.grad, other) for mine, other in zip([*layer.parameters(), inputs], expected, strict=True)
    )
    assert forward >= 0.03 and now() - began >= 0.09


def test_gradients_are_ready_when_the_time_has_passed():
    layer = nn.Linear(1, 1)
    arrived = []
    layer.weight.register_post_accumulate_grad_hook(lambda _: arrived.append(now()))
    loss = take_time(layer(torch.ones(1)), 0, 0.05).sum()
    began = now()
    loss.backward()
    assert arrived[0] - began >= 0.05


@pytest.mark.parametrize("bad", [-1, float("nan"), float("inf"), "5 ms"])
@pytest.mark.parametrize("name", ["forward", "backward"])
def test_a_time_that_is_none(name, bad):
    with pytest.raises(ValueError, match=f"{name} must be a finite number, 0 or more, not {bad!r}"):
        take_time(torch.ones(1), **{"forward": 0, "backward": 0, name: bad})
