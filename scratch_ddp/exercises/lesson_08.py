"""Lesson 08, where communication can hide: averages that start from gradient hooks; what sticks out of a timeline."""

import functools
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.exercises.exercise import Exercise, WrongAnswer
from scratch_ddp.exercises.trial import Trial
from scratch_ddp.exercises.wording import difference
from scratch_ddp.traffic.taps import Call, listening


def average_when_ready(model):
    """Have every gradient averaged over the ranks while backward goes on.

    Return a function `finish`: after backward and `finish()`, every gradient is the mean, in
    each step anew. Parameters with `requires_grad=False` are left alone.
    Cost: one all-reduce for each trainable parameter. It is started when the gradient is
    complete, and nobody waits for it before `finish()`.
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


class _Started:
    """How many collectives have been started, and how many waited for."""

    def __init__(self) -> None:
        self.calls, self.waits = 0, 0

    def started(self, call: Call) -> None:
        self.calls += 1

    def waited(self, call: Call) -> None:
        self.waits += 1


def examine_average_when_ready(trial: Trial) -> None:
    """V and A over two steps; C; overlap: all is started when backward returns, and nothing has been waited for."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(2, 1)).double().to(trial.device)
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.5)
    model[1].requires_grad_(False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    finish = trial.call(model, case="called with a model")
    for step in range(2):
        seen = _Started()
        inputs = [torch.full((1, 3), 2.0**step * (rank + 1), dtype=torch.float64) for rank in range(trial.size)]
        run = functools.partial(_one_step, model=model, inputs=inputs[trial.rank].to(trial.device), seen=seen)
        in_backward = trial.call(finish, case=f"step {step}", using=lambda _, finish, run=run: run(finish))
        trial.cost(calls={"all_reduce": len(trained)})
        trial.criterion("overlap", _why_not_hidden(in_backward, len(trained)))
        expected = _mean_gradients(model, trained, [each.to(trial.device) for each in inputs])
        if on_the_way := seen.calls - seen.waits:
            trial.criterion("value", f"finish() returned while {on_the_way} messages were under way")
            return
        gradients = [parameter.grad for parameter in trained]
        trial.criterion("value", difference(gradients, expected, 1e-12), "the gradients")
        trial.agreement(gradients)


def _one_step(finish, model: nn.Module, inputs: torch.Tensor, seen: _Started) -> tuple[int, int]:
    """Run a step as a learner would; return how many collectives were started and waited for when backward returned."""
    model.zero_grad()
    with listening(seen):
        model(inputs).sum().backward()
        in_backward = seen.calls, seen.waits
        finish()
    return in_backward


def _why_not_hidden(in_backward: tuple[int, int], messages: int) -> str:
    calls, waits = in_backward
    if waits:
        return f"when backward returned, {waits} of {messages} messages had been waited for, should be 0"
    return "" if calls >= messages else f"when backward returned, {calls} of {messages} messages were started"


def _mean_gradients(model: nn.Module, trained: list[nn.Parameter], inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """What one process computes; without hooks, which `torch.autograd.grad` does not call."""
    loss = sum(model(each).sum() for each in inputs) / len(inputs)
    return list(torch.autograd.grad(loss, trained))


AVERAGE_WHEN_READY = Exercise(
    average_when_ready,
    examine_average_when_ready,
    wrong=(
        WrongAnswer(
            "takes its argument for the gradient: it is the parameter",
            fails="value",
            says="Rank 0, step 0: the gradients at entry 0 is wrong in",
            edits={
                "parameter.grad /= dist": "parameter /= dist",
                "works.append(dist.all_reduce(parameter.grad,": "works.append(dist.all_reduce(parameter,",
            },
            also=("agreement",),
        ),
        WrongAnswer(
            "waits inside the hook",
            fails="overlap",
            says="Rank 0, step 0: when backward returned, 4 of 4 messages had been waited for, should be 0.",
            edits={
                "works.append(dist.all_reduce(parameter.grad, async_op=True))": "dist.all_reduce(parameter.grad)",
            },
        ),
        WrongAnswer(
            "waits for the message before",
            fails="overlap",
            says="Rank 0, step 0: when backward returned, 3 of 4 messages had been waited for, should be 0.",
            edits={
                "        works.append(": (
                    "        for before in works[-1:]:\n            before.wait()\n        works.append("
                ),
            },
        ),
        WrongAnswer(
            "starts everything in finish",
            fails="overlap",
            says="Rank 0, step 0: when backward returned, 0 of 4 messages were started.",
            body="""
def finish():
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad /= dist.get_world_size()
            dist.all_reduce(parameter.grad)
""",
        ),
        WrongAnswer(
            "does not divide",
            fails="value",
            says="Rank 0, step 0: the gradients at entry 0 is wrong in",
            edits={
                "        parameter.grad /= dist.get_world_size()  "
                "# before the sum, which could be too large for half precision\n": ""
            },
        ),
        WrongAnswer(
            "nobody waits",
            fails="value",
            says="Rank 0, step 0: finish() returned while 4 messages were under way.",
            edits={"work.wait()": "pass"},
        ),
        WrongAnswer(
            "a hook on frozen parameters too",
            fails="runs",
            says="called with a model: Ranks 0, 1, 2 and 3 raised RuntimeError",
            edits={
                "        if parameter.requires_grad:\n            parameter.register": "        parameter.register",
            },
        ),
    ),
)


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
    for case, (compute, communication, expected) in _CASES.items():
        scale = float(trial.rank + 1)
        given = [[(scale * start, scale * end) for start, end in stretches] for stretches in (compute, communication)]
        before = [list(stretches) for stretches in given]
        result = trial.call(*given, case=case)
        trial.value(result, scale * expected)
        trial.untouched(given, before, "what was passed")
        trial.cost(calls={})


EXPOSED_TIME = Exercise(
    exposed_time,
    examine_exposed_time,
    given="from itertools import pairwise",
    wrong=(
        WrongAnswer(
            "all communication less all computing",
            fails="value",
            says="Rank 0, a message after backward: the result is 0.0, should be 3.0.",
            body="""
computing = sum(end - start for start, end in compute)
return max(0.0, sum(end - start for start, end in communication) - computing)
""",
        ),
        WrongAnswer(
            "what comes after the last computing",
            fails="value",
            says="Rank 0, a gap in computing: the result is 0.0, should be 3.0.",
            body="""
last = max((end for _, end in compute), default=0.0)
return float(sum(max(0.0, end - max(start, last)) for start, end in communication))
""",
        ),
        WrongAnswer(
            "messages that overlap count twice",
            fails="value",
            says="Rank 0, two messages at once: the result is 4.0, should be 3.0.",
            edits={
                "on_the_wire = any(": "on_the_wire = sum(",
                "if on_the_wire and not computing:\n            exposed += end - start": (
                    "if not computing:\n            exposed += on_the_wire * (end - start)"
                ),
            },
        ),
        WrongAnswer(
            "takes off computing message by message, twice where it overlaps",
            fails="value",
            says="Rank 0, computing in two threads: the result is 0.0, should be 1.0.",
            body="""
exposed = 0.0
for start, end in communication:
    hidden = sum(max(0.0, min(end, b) - max(start, a)) for a, b in compute)
    exposed += end - start - hidden
return exposed
""",
        ),
        WrongAnswer(
            "only messages that are exposed from beginning to end",
            fails="value",
            says="Rank 0, a tail: the result is 0.0, should be 0.5.",
            body="""
def beside(start, end):
    return any(a < end and start < b for a, b in compute)

return float(sum(end - start for start, end in communication if not beside(start, end)))
""",
        ),
        WrongAnswer(
            "sorts the caller's list",
            fails="untouched",
            says="Rank 0, a gap in computing: what was passed",
            edits={"    moments = sorted(": "    compute.sort()\n    moments = sorted("},
        ),
    ),
)
EXERCISES = (AVERAGE_WHEN_READY, EXPOSED_TIME)
