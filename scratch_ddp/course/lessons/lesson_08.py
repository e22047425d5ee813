"""Lesson 08, where communication can hide: averages that start from gradient hooks, and what sticks out."""

import time
import weakref
from itertools import pairwise
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.course.exercise import Exercise
from scratch_ddp.course.lessons import overlap


def average_when_ready(model):
    """Have every gradient averaged over the ranks while backward goes on.

    Return a function `finish`. After backward and finish(), in each step, gradients are
    means. A step uses the same parameters on all ranks; frozen and unused ones are left
    alone, even with a gradient. Cost: one all-reduce a gradient, started as soon as it
    is complete. Nobody waits before finish(); afterwards no handle is kept.
    """
    works = []  # what is under way
    # What does a hook do when its gradient is complete, and what is left for finish()?

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

    # end of the answer
    return finish


def _steps(answer):
    """Of two layers, with a frozen one below, and one on top that only the first step uses."""
    model = nn.ModuleDict({name: nn.Linear(4, 4).double() for name in ("first", "second", "frozen", "seldom")})
    model["frozen"].requires_grad_(False)
    batches = torch.randn(dist.get_world_size(), 2, 3, 4).double()[dist.get_rank()]
    finish, handles, all_reduce = answer(model), weakref.WeakSet(), dist.all_reduce

    def noted(*args, **options):
        work = all_reduce(*args, **options)
        handles.update([work] if work else [])
        return work

    def loss(x, layers):
        for name in ("frozen", "first", "second", "seldom")[:layers]:
            x = model[name](x).tanh()
        return x.square().mean()

    for number, batch in enumerate(batches):
        with mock.patch.object(dist, "all_reduce", noted):
            yield from overlap(f"step {number}", model["first"], loss, batch, 4 - number)
        finish()
        yield "value", f"step {number}", model
        deadline = time.monotonic() + 0.1  # a thread of the backend may hold a handle for a moment
        while handles and time.monotonic() < deadline:
            time.sleep(0.001)
        yield "memory", f"step {number}: the number of handles kept after finish()", len(handles)
        for name in ("first", "second"):  # the gradient of the seldom one stays
            model[name].zero_grad()


def exposed_time(compute, communication):
    """Return the seconds in which something is on the wire and nothing is computed.

    Both are lists of (start, end), in any order, perhaps empty. Messages may overlap;
    so may stretches of computing.
    """
    # Between which moments does nothing begin or end?
    moments = sorted({moment for stretch in [*compute, *communication] for moment in stretch})
    exposed = 0.0
    for start, end in pairwise(moments):
        on_the_wire = any(a <= start and end <= b for a, b in communication)
        computing = any(a <= start and end <= b for a, b in compute)
        if on_the_wire and not computing:
            exposed += end - start
    return exposed


_TIMELINES = (  # computing, communication
    ([(0.0, 4.0)], [(4.0, 7.0)]),
    ([(0.0, 4.0)], [(1.0, 3.0), (3.0, 4.5)]),
    ([(5.0, 6.0), (0.0, 2.0)], [(1.0, 5.5)]),
    ([(0.0, 1.0)], [(0.5, 3.0), (2.0, 4.0)]),  # two messages at once
    ([(0.0, 3.0), (2.0, 5.0)], [(1.0, 6.0)]),  # computing in two threads
    ([(4.0, 5.0)], [(0.0, 4.0), (1.0, 2.0)]),
    ([], [(1.0, 2.0)]),
    ([(0.0, 4.0)], []),
)
EXERCISES = (
    Exercise(average_when_ready, {"two steps": ()}, use=_steps, close=1e-9),
    Exercise(exposed_time, _TIMELINES, close=1e-9, given="from itertools import pairwise"),
)
