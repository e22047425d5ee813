"""Lesson 09, how large a message: gradients that travel in buckets."""

import functools

import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.exercises.averaging import Watched, everyones_inputs, examine_means, three_layers
from scratch_ddp.exercises.exercise import Exercise, WrongAnswer
from scratch_ddp.exercises.trial import Trial


def average_in_buckets(buckets):
    """Have the gradients of each bucket, a list of parameters, averaged while backward goes on.

    Return a function `finish`: after backward and `finish()`, every gradient is the mean over
    the ranks, in each step anew. All parameters are used, gradients are cleared between steps.
    Gradients may arrive in any order, and in another one on each rank.
    Cost: one all-reduce a bucket. It is started when the gradients of this bucket and of all
    buckets before it are complete, and nobody waits for it before `finish()`.
    """
    missing = [len(bucket) for bucket in buckets]  # how many gradients each of them waits for
    on_the_way = []
    # What does a hook need to know about its parameter? Which bucket may start now?
    # answer: begin
    number_of = {parameter: number for number, bucket in enumerate(buckets) for parameter in bucket}

    def hook(parameter):
        missing[number_of[parameter]] -= 1
        while len(on_the_way) < len(buckets) and missing[len(on_the_way)] == 0:
            bucket = buckets[len(on_the_way)]  # the next in the order that all ranks keep
            flat = torch.cat([each.grad.flatten() for each in bucket])
            flat /= dist.get_world_size()
            on_the_way.append((bucket, flat, dist.all_reduce(flat, async_op=True)))

    for parameter in number_of:
        parameter.register_post_accumulate_grad_hook(hook)

    def finish():
        for bucket, flat, work in on_the_way:
            work.wait()
            parts = flat.split([each.numel() for each in bucket])
            for each, part in zip(bucket, parts, strict=True):
                each.grad.copy_(part.view_as(each))
        on_the_way.clear()
        missing[:] = map(len, buckets)  # for the next step

    # answer: end
    return finish


def examine_average_in_buckets(trial: Trial) -> None:
    """V and A in two steps, then in other orders of gradients; C; overlap: no bucket is late, and nobody has waited."""
    model = three_layers(trial)
    *first, third, fourth, fifth, sixth = reversed(list(model.parameters()))
    buckets = [first, [third], [fourth, sixth, fifth]]
    finish = trial.call([list(bucket) for bucket in buckets], case="called with three buckets")
    if not all(_examine_step(trial, finish, model, buckets, step, f"step {step}") for step in range(2)):
        return
    model = _Branches(trial)
    buckets = [list(branch.parameters()) for branch in model.branches]
    finish = trial.call([list(bucket) for bucket in buckets], case="called with buckets of another model")
    if _examine_step(trial, finish, model, buckets, 2, "the last bucket is complete first"):
        model.turn = trial.rank
        _examine_step(trial, finish, model, buckets, 3, "another order on each rank")


def _examine_step(trial: Trial, finish, model: nn.Module, buckets: list, step: int, case: str) -> bool:
    """Return whether as many messages as there are buckets were started and waited for, the same on all ranks."""
    seen = Watched(buckets, in_order=True)
    inputs = everyones_inputs(trial, step)
    model.zero_grad()
    run = functools.partial(_watched_step, seen=seen, model=model, inputs=inputs[trial.rank])
    trial.call(finish, case=case, using=run)
    trial.cost(calls={"all_reduce": len(buckets)})
    trial.criterion("overlap", seen.why_not_hidden())
    if under_way := seen.calls - seen.waits:
        trial.criterion("value", f"finish() returned while {under_way} messages were under way")
    elif seen.calls < len(buckets):
        trial.criterion("value", f"finish() returned when {seen.calls} of {len(buckets)} messages had been started")
    else:
        examine_means(trial, model, [inputs])
    return seen.waits >= len(buckets)


def _watched_step(_, finish, seen: Watched, model: nn.Module, inputs: torch.Tensor) -> None:
    seen.step(lambda: model(inputs).sum(), finish)


class _Branches(nn.Module):
    """Three branches, computed in an order that `turn` sets; backward reaches them in the reverse of it.

    All gradients have one size: if messages of different sizes met, gloo would end the process.
    """

    def __init__(self, trial: Trial):
        super().__init__()
        self.branches = nn.ModuleList(nn.Sequential(*(nn.Linear(48, 48, bias=False) for _ in range(2))) for _ in "abc")
        self.turn = 0
        generator = torch.Generator().manual_seed(9)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, generator=generator)
        self.double().to(trial.device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(self.branches[(self.turn + place) % 3](x) for place in range(3))


AVERAGE_IN_BUCKETS = Exercise(
    average_in_buckets,
    examine_average_in_buckets,
    wrong=(
        WrongAnswer(
            "sums",
            fails="value",
            says="Rank 0, step 0: the gradients at entry 0 is wrong in",
            edits={"            flat /= dist.get_world_size()\n": ""},
        ),
        WrongAnswer(
            "the counters are not reset",
            fails="overlap",
            says="Rank 0, step 1: when backward returned, 0 of 3 messages were started.",
            edits={"        missing[:] = map(len, buckets)  # for the next step\n": ""},
            also=("value",),
        ),
        WrongAnswer(
            "waits inside the hook",
            fails="overlap",
            says="Rank 0, step 0: when backward returned, 3 of 3 messages had been waited for, should be 0.",
            edits={
                "on_the_way.append((bucket, flat, dist.all_reduce(flat, async_op=True)))": (
                    "work = dist.all_reduce(flat, async_op=True)\n"
                    "            work.wait()\n"
                    "            on_the_way.append((bucket, flat, work))"
                ),
            },
        ),
        WrongAnswer(
            "starts a bucket when it is complete: which is first depends on the rank",
            fails="value",
            says="Rank 0, another order on each rank: the gradients at entry 0 is wrong in",
            edits={
                "        while len(on_the_way) < len(buckets) and missing[len(on_the_way)] == 0:\n"
                "            bucket = buckets[len(on_the_way)]  # the next in the order that all ranks keep\n": (
                    "        if missing[number_of[parameter]] == 0:\n"
                    "            bucket = buckets[number_of[parameter]]\n"
                ),
            },
            also=("agreement",),
        ),
        WrongAnswer(
            "looks at the next bucket only once, though the one after it may be complete as well",
            fails="overlap",
            says="Rank 0, the last bucket is complete first: when backward returned, 1 of 3 messages were started.",
            edits={"while len(on_the_way) < len(buckets)": "if len(on_the_way) < len(buckets)"},
            also=("value",),
        ),
        WrongAnswer(
            "starts with the bucket's first gradient",
            fails="runs",
            says="raised AttributeError: 'NoneType' object has no attribute 'flatten'",
            edits={"missing[len(on_the_way)] == 0:": "missing[len(on_the_way)] < len(buckets[len(on_the_way)]):"},
        ),
        WrongAnswer(
            "all hooks share the loop's variable, which ends with the last bucket",
            fails="overlap",
            says="Rank 0, step 0: when backward returned, 0 of 3 messages were started.",
            edits={
                "missing[number_of[parameter]]": "missing[number]",
                "for parameter in number_of:": "for parameter, number in number_of.items():",
            },
            also=("value",),
        ),
        WrongAnswer(
            "a message for each gradient",
            fails="cost",
            says="calls all_reduce 6 times, budget 3",
            body="""
def hook(parameter):
    parameter.grad /= dist.get_world_size()
    on_the_way.append(dist.all_reduce(parameter.grad, async_op=True))

for bucket in buckets:
    for parameter in bucket:
        parameter.register_post_accumulate_grad_hook(hook)

def finish():
    for work in on_the_way:
        work.wait()
    on_the_way.clear()
""",
            also=("value", "agreement"),
        ),
        WrongAnswer(
            "starts everything with the last gradient of all",
            fails="overlap",
            says="Rank 0, step 0: a bucket had all its gradients, and its message was started later.",
            edits={"missing[len(on_the_way)] == 0:": "not any(missing):"},
        ),
        WrongAnswer(
            "the means stay in the flat tensor",
            fails="value",
            says="Rank 0, step 0: the gradients at entry 0 is wrong in",
            edits={"                each.grad.copy_(part.view_as(each))": "                part.view_as(each)"},
            also=("agreement",),
        ),
    ),
)
EXERCISES = (AVERAGE_IN_BUCKETS,)
