"""The exercises, one file per lesson. Here: what several of them are made of."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from scratch_ddp.course.exercise import RESULT, Seen
from scratch_ddp.course.run import started_and_waited_for
from scratch_ddp.instruments.traffic import traffic


def with_backward(answer: Callable, x: torch.Tensor, other: Any) -> Iterator[Seen]:
    """A use: x needs a gradient, which the sum of the result's cubes gives it."""
    leaf = x.clone().requires_grad_()
    result = answer(leaf * 1, other)
    yield "value", RESULT, result
    result.pow(3).sum().backward()
    yield "value", "the gradient of the first argument", leaf.grad
    yield "value", "the second argument", other


def overlap(step: str, first: nn.Module, loss: Callable[..., torch.Tensor], *args: Any) -> Iterator[Seen]:
    """Backward of loss(*args): messages started before that of the `first` layer, and what goes on at its end."""
    early = []
    with traffic() as counted:
        note = lambda _: early.append(sum(counted.calls.values()))  # noqa: E731
        hook = first.register_forward_hook(lambda *of_call: of_call[-1].register_hook(note) and None)
        loss(*args).backward()
    hook.remove()
    yield "overlap", f"{step}: the number of messages started before the first layer's backward", early[0]
    for what, times in started_and_waited_for(counted).items():
        yield "overlap", f"{step}: the number of messages {what} when backward returned", times
