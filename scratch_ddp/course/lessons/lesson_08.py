"""Lesson 08, where communication can hide: averages that start from gradient hooks; what sticks out of a timeline."""

import functools
from itertools import pairwise

import torch.distributed as dist

from scratch_ddp.course.exercise import Exercise
from scratch_ddp.course.guard import GRADIENTS, HOOKS
from scratch_ddp.course.lessons.averaging import ObservedStep, everyones_inputs, examine_means, three_layers
from scratch_ddp.course.trial import Trial


def average_when_ready(model):
    """Have every gradient averaged over the ranks while backward goes on.

    Return a function `finish`: after backward and `finish()`, every gradient is the mean, in
    each step anew. Parameters with `requires_grad=False` are left alone.
    Cost: one all-reduce for each trainable parameter. It is started when the gradient is
    complete, and nobody waits for it, or asks whether it has ended, before `finish()`, which
    then lets go of it.
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


def examine_average_when_ready(trial: Trial) -> None:
    """V and A over two steps; C; overlap: all is started when backward returns, and nothing has been waited for; M."""
    model = three_layers(trial)
    model[1].requires_grad_(False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    finish = trial.call(model, case="called with a model", changes=[HOOKS])
    before = None
    for step in range(2):
        observed, inputs = ObservedStep([[parameter] for parameter in trained]), everyones_inputs(trial, step)
        mine = inputs[trial.rank]
        model.zero_grad()
        run = functools.partial(observed.run, lambda mine=mine: model(mine).sum())
        trial.call(
            finish,
            case=f"step {step}",
            using=lambda _, finish, run=run: run(finish),
            beside=[model],
            changes=[GRADIENTS],
        )
        trial.cost(calls={"all_reduce": len(trained)})
        trial.criterion("overlap", observed.exposed())
        if under_way := observed.calls - observed.waits:
            trial.criterion("value", f"finish() returned while {under_way} messages were under way")
            return
        trial.criterion("memory", before.kept() if before else "")
        before = observed
        examine_means(trial, model, [inputs])


AVERAGE_WHEN_READY = Exercise(average_when_ready, examine_average_when_ready)


def exposed_time(compute, communication):
    """Seconds in which something is on the wire and the rank does not compute.

    Both are lists of (start, end) in seconds, in any order; messages may overlap, and so may
    stretches of computing. Cost: nothing is sent.
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


_CASES = {  # case: (compute, communication, seconds)
    "a message after backward": ([(0.0, 4.0)], [(4.0, 7.0)], 3.0),
    "a message beside backward": ([(0.0, 4.0)], [(1.0, 3.0)], 0.0),
    "a tail": ([(0.0, 4.0)], [(1.0, 3.0), (3.0, 4.5)], 0.5),
    "a gap in computing": ([(5.0, 6.0), (0.0, 2.0)], [(1.0, 5.5)], 3.0),
    "computing in two threads": ([(0.0, 3.0), (2.0, 5.0)], [(1.0, 6.0)], 1.0),
    "two messages at once": ([(0.0, 1.0)], [(0.5, 3.0), (2.0, 4.0)], 3.0),
    "more computing than messages": ([(0.0, 10.0)], [(9.0, 12.0)], 2.0),
    "nothing on the wire": ([(0.0, 4.0)], [], 0.0),
    "nothing computed": ([], [(1.0, 2.0)], 1.0),
}


def examine_exposed_time(trial: Trial) -> None:
    """V on stretches whose ends are exact in binary, each rank with others; C: nothing is sent."""
    cases = [(case, float(trial.rank + 1), given) for case, given in _CASES.items()]
    cases += [(f"{case}, in units of 1/1024 s", (trial.rank + 1) / 1024, given) for case, given in _CASES.items()]
    for case, scale, (compute, communication, expected) in cases:
        given = [[(scale * start, scale * end) for start, end in stretches] for stretches in (compute, communication)]
        trial.value(trial.call(*given, case=case), scale * expected)
        trial.cost(calls={})


EXPOSED_TIME = Exercise(
    exposed_time,
    examine_exposed_time,
    given="from itertools import pairwise",
)
EXERCISES = (AVERAGE_WHEN_READY, EXPOSED_TIME)
