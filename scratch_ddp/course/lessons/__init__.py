"""The exercises, one file per lesson. Here: what several of them are made of."""

import copy
import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from scratch_ddp.course.arena import At
from scratch_ddp.course.exercise import RESULT, Seen, call
from scratch_ddp.course.run import started_and_waited_for
from scratch_ddp.instruments.traffic import traffic

Inputs = Callable[[At], Iterator[tuple[str, tuple]]]


def cases(given: Mapping[str, tuple]) -> Inputs:
    """Inputs that are the same on all ranks: arguments by the name of the case."""
    return lambda at: iter(copy.deepcopy(list(given.items())))


def named_cases(words: str, *given: tuple) -> Inputs:
    """The same for arguments that name their case: `words` has a place for each, as in "p = {}, m = {}"."""
    return cases({words.format(*arguments): arguments for arguments in given})


def with_optimizers(inputs: Inputs) -> Inputs:
    """The same inputs, once torch has imported what the first optimizer needs: that takes seconds, not the answer's."""

    def ready(at: At) -> Iterator[tuple[str, tuple]]:
        importlib.import_module("torch._dynamo")
        return inputs(at)

    return ready


def parts(*names: str) -> Callable[..., Iterator[Seen]]:
    """A use: the answer is called once and returns several values, of these names."""

    def use(answer: Callable, *args: Any) -> Iterator[Seen]:
        for criterion, what, value in call(answer, *args):
            seen = zip(names, value, strict=True) if what == RESULT else [(what, value)]
            yield from ((criterion, *each) for each in seen)

    return use


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
