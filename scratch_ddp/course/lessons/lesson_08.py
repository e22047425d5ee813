"""Lesson 08, where communication can hide: averages that start from gradient hooks, and what sticks out."""

import time
import weakref
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.course.exercise import At, Exercise
from scratch_ddp.course.run import started_and_waited_for
from scratch_ddp.instruments.traffic import Counted, traffic


def average_when_ready(model):
    """Have every gradient averaged over the ranks while backward goes on.

    Return a function `finish`. After backward and finish(), in each step, gradients are
    means. Frozen parameters, and those that no rank uses in a step, are left alone.
    Cost: one all-reduce a gradient, started as soon as it is complete. Nobody waits
    before finish(); afterwards no handle is kept.
    """
    works = []  # what is under way
    # What does a hook do when its gradient is complete, and what is left for finish()?
    # answer: begin

    def hook(parameter):
        parameter.grad /= dist.get_world_size()  # before the sum, which could be too large for half precision
        works.append(dist.all_reduce(parameter.grad, async_op=True))

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(hook)

    def finish():
        for work in works:
            work.wait()
        works.clear()

    # answer: end
    return finish


class Layers(nn.Module):
    """Two layers, a frozen one, and one that only some steps use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.frozen, self.seldom = (nn.Linear(4, 4).double() for _ in range(4))
        self.frozen.requires_grad_(False)
        self.started_before_first = 0

    def forward(self, x: torch.Tensor, seldom: bool, counted: Counted) -> torch.Tensor:
        x = self.first(self.frozen(x))

        def note(_: torch.Tensor) -> None:
            self.started_before_first = sum(counted.calls.values())

        x.register_hook(note)
        x = self.second(x.tanh())
        return self.seldom(x) if seldom else x


def _layers(at: At) -> Iterator[tuple[str, tuple]]:
    generator = torch.Generator().manual_seed(at.rank)
    yield "two steps", (Layers(), torch.randn(2, 3, 4, generator=generator, dtype=torch.float64))


def _steps(answer: Callable, model: Layers, batches: torch.Tensor) -> Iterator[tuple[str, str, Any]]:
    finish, handles, all_reduce = answer(model), [], dist.all_reduce

    def noted(*args: Any, **options: Any) -> dist.Work | None:
        work = all_reduce(*args, **options)
        handles.extend([weakref.ref(work)] if work else [])
        return work

    for number, batch in enumerate(batches):
        with traffic() as counted, mock.patch.object(dist, "all_reduce", noted):
            model(batch, number == 0, counted).square().mean().backward()
        before = f"step {number}: the number of messages started before the first layer's backward"
        yield "overlap", before, model.started_before_first
        for what, times in started_and_waited_for(counted).items():
            yield "overlap", f"step {number}: the number of messages {what} when backward returned", times
        finish()
        yield "value", f"step {number}", model
        yield "memory", f"step {number}: the number of handles kept after finish()", _kept(handles)
        model.zero_grad()


def _kept(handles: list[weakref.ref]) -> int:
    """How many handles are still there. A thread of the backend may hold one for a moment after its message."""
    deadline = time.monotonic() + 0.1
    while (kept := sum(handle() is not None for handle in handles)) and time.monotonic() < deadline:
        time.sleep(0.001)
    return kept


def exposed_time(compute, communication):
    """Return the seconds in which something is on the wire and nothing is computed.

    Both are lists of (start, end), in any order, perhaps empty. Messages may overlap;
    so may stretches of computing.
    """
    # Between which moments does nothing begin or end?
    # answer: begin
    moments = sorted({moment for stretch in [*compute, *communication] for moment in stretch})
    exposed = 0.0
    for start, end in pairwise(moments):
        on_the_wire = any(a <= start and end <= b for a, b in communication)
        computing = any(a <= start and end <= b for a, b in compute)
        if on_the_wire and not computing:
            exposed += end - start
    return exposed
    # answer: end


def _timelines(at: At) -> Iterator[tuple[str, tuple]]:
    yield "a message after backward", ([(0.0, 4.0)], [(4.0, 7.0)])
    yield "a message beside backward", ([(0.0, 4.0)], [(1.0, 3.0)])
    yield "a tail", ([(0.0, 4.0)], [(1.0, 3.0), (3.0, 4.5)])
    yield "more computing than messages", ([(0.0, 10.0)], [(9.0, 12.0)])
    yield "a gap in computing", ([(5.0, 6.0), (0.0, 2.0)], [(1.0, 5.5)])
    yield "a pause before the message", ([(0.0, 1.0)], [(2.0, 3.0)])
    yield "two messages at once", ([(0.0, 1.0)], [(0.5, 3.0), (2.0, 4.0)])
    yield "computing in two threads", ([(0.0, 3.0), (2.0, 5.0)], [(1.0, 6.0)])
    yield "a message inside another", ([(4.0, 5.0)], [(0.0, 4.0), (1.0, 2.0)])
    yield "nothing computed", ([], [(1.0, 2.0)])
    yield "nothing on the wire", ([(0.0, 4.0)], [])


EXERCISES = (
    Exercise(average_when_ready, _layers, use=_steps, close=1e-9),
    Exercise(exposed_time, _timelines, close=1e-9, given="from itertools import pairwise"),
)
