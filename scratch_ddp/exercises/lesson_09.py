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
    Cost: one all-reduce a bucket. It is started when the bucket's last gradient is complete,
    and nobody waits for it before `finish()`.
    """
    missing = [len(bucket) for bucket in buckets]  # how many gradients each of them waits for
    on_the_way = []
    # What does a hook need to know about its parameter?
    # answer: begin

    def make_hook(number, bucket):
        def hook(parameter):
            missing[number] -= 1
            if missing[number] == 0:
                missing[number] = len(bucket)  # for the next step
                flat = torch.cat([each.grad.flatten() for each in bucket])
                flat /= dist.get_world_size()
                on_the_way.append((bucket, flat, dist.all_reduce(flat, async_op=True)))

        return hook

    for number, bucket in enumerate(buckets):
        for parameter in bucket:
            parameter.register_post_accumulate_grad_hook(make_hook(number, bucket))

    def finish():
        for bucket, flat, work in on_the_way:
            work.wait()
            parts = flat.split([each.numel() for each in bucket])
            for each, part in zip(bucket, parts, strict=True):
                each.grad.copy_(part.view_as(each))
        on_the_way.clear()

    # answer: end
    return finish


def examine_average_in_buckets(trial: Trial) -> None:
    """V and A over two steps; C; overlap: each bucket starts with its last gradient, and nobody has waited for it."""
    model = three_layers(trial)
    *first, third, fourth, fifth, sixth = reversed(list(model.parameters()))
    buckets = [first, [third], [fourth, sixth, fifth]]
    finish = trial.call([list(bucket) for bucket in buckets], case="called with three buckets")
    for step in range(2):
        seen = Watched(buckets)
        inputs = everyones_inputs(trial, step)
        model.zero_grad()
        run = functools.partial(_watched_step, seen=seen, model=model, inputs=inputs[trial.rank])
        trial.call(finish, case=f"step {step}", using=run)
        trial.cost(calls={"all_reduce": len(buckets)})
        trial.criterion("overlap", seen.why_not_hidden())
        if under_way := seen.calls - seen.waits:
            trial.criterion("value", f"finish() returned while {under_way} messages were under way")
            return
        examine_means(trial, model, [inputs])


def _watched_step(_, finish, seen: Watched, model: nn.Module, inputs: torch.Tensor) -> None:
    seen.step(lambda: model(inputs).sum(), finish)


AVERAGE_IN_BUCKETS = Exercise(
    average_in_buckets,
    examine_average_in_buckets,
    wrong=(
        WrongAnswer(
            "sums",
            fails="value",
            says="Rank 0, step 0: the gradients at entry 0 is wrong in",
            edits={"                flat /= dist.get_world_size()\n": ""},
        ),
        WrongAnswer(
            "the counters are not reset",
            fails="overlap",
            says="Rank 0, step 1: when backward returned, 0 of 3 messages were started.",
            edits={"                missing[number] = len(bucket)  # for the next step\n": ""},
            also=("value", "agreement"),
        ),
        WrongAnswer(
            "waits inside the hook",
            fails="overlap",
            says="Rank 0, step 0: when backward returned, 3 of 3 messages had been waited for, should be 0.",
            edits={
                "on_the_way.append((bucket, flat, dist.all_reduce(flat, async_op=True)))": (
                    "work = dist.all_reduce(flat, async_op=True)\n"
                    "                work.wait()\n"
                    "                on_the_way.append((bucket, flat, work))"
                ),
            },
        ),
        WrongAnswer(
            "starts with the bucket's first gradient",
            fails="runs",
            says="raised AttributeError: 'NoneType' object has no attribute 'flatten'",
            edits={"if missing[number] == 0:": "if missing[number] == len(bucket) - 1:"},
        ),
        WrongAnswer(
            "all hooks share the loop's variables, which end with the last bucket",
            fails="runs",
            says="raised AttributeError: 'NoneType' object has no attribute 'flatten'",
            edits={
                "def make_hook(number, bucket):": "def make_hook():",
                "make_hook(number, bucket))": "make_hook())",
            },
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
        ),
        WrongAnswer(
            "starts everything with the last gradient of all",
            fails="overlap",
            says="Rank 0, step 0: a bucket had all its gradients, and its message was started later.",
            edits={
                "            missing[number] -= 1\n            if missing[number] == 0:\n"
                "                missing[number] = len(bucket)  # for the next step\n": (
                    "            missing[number] -= 1\n            if any(missing):\n                return\n"
                    "            missing[:] = map(len, buckets)\n            for bucket in buckets:\n"
                ),
                "def make_hook(number, bucket):": "def make_hook(number, _):",
            },
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
