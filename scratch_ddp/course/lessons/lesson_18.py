"""Lesson 18, seldom: DiLoCo's outer step, error feedback, and how seldom a link needs it."""

from math import ceil

import torch
import torch.distributed as dist

from scratch_ddp.course.exercise import Exercise
from scratch_ddp.course.lessons import cases, named_cases


def outer_step(params, agreed, velocity, lr, momentum):
    """Let the ranks meet: a step of Nesterov along the mean way that they have gone.

    params: what this rank has. agreed: what all had when they last met. The gradient is
    the mean over ranks of agreed - params. velocity becomes momentum · velocity +
    gradient; then agreed becomes agreed - lr · (gradient + momentum · velocity), and
    params the same. Cost: one all-reduce for each parameter.
    """
    # In which direction does agreed - params point, and in which a gradient?
    # answer: begin
    for mine, last, speed in zip(params, agreed, velocity, strict=True):
        gradient = (last - mine) / dist.get_world_size()
        dist.all_reduce(gradient)
        speed.mul_(momentum).add_(gradient)
        last.sub_(lr * (gradient + momentum * speed))
        mine.copy_(last)
    # answer: end


def _met(answer, lr, momentum):
    agreed, way = [torch.full((2, 3), 8.0), torch.full((4,), -8.0)], 12 * (dist.get_rank() + 1) / dist.get_world_size()
    params, velocity = [each.clone() for each in agreed], [torch.zeros_like(each) for each in agreed]
    for meeting in range(3):
        for number, each in enumerate(params):
            each -= way * (number + 1) * (meeting + 1)
        answer(params, agreed, velocity, lr, momentum)
        for name, tensors in (("params", params), ("agreed", agreed), ("velocity", velocity)):
            yield "value", f"meeting {meeting}: {name}", tensors


def send_largest(gradient, residual, k):
    """Replace gradient by the mean of what the ranks send: the k largest of each.

    Both tensors have one dimension. residual holds what this rank has not sent so far:
    add it to gradient first, and leave in it what is not sent now. Largest means by
    absolute value; what a rank does not send counts as 0. Cost: two all-gathers of k.
    """
    # What is left of the sum when the k entries have gone?
    # answer: begin
    residual += gradient
    places = residual.abs().topk(k).indices
    values = residual[places]
    residual[places] = 0

    n = dist.get_world_size()
    all_values, all_places = values.new_empty(n * k), places.new_empty(n * k)
    dist.all_gather(list(all_values.split(k)), values)
    dist.all_gather(list(all_places.split(k)), places)
    gradient.zero_().index_add_(0, all_places, all_values / n)
    # answer: end


def _sent(answer, k, size):
    residual = torch.zeros(size, dtype=torch.float64)
    for step in range(3):
        gradient = torch.randn(size).double() + dist.get_rank()
        answer(gradient, residual, k)
        yield "value", f"step {step}: gradient", gradient
        yield "value", f"step {step}: residual", residual


def steps_between(nbytes, n, bandwidth, latency, compute):
    """Return the least number of steps from one meeting to the next that hides it.

    Hidden: the ring all-reduce of nbytes over n ranks takes no longer than the steps,
    of compute seconds each. A link carries bandwidth bytes in a second, and each of the
    ring's rounds takes latency seconds more. The least is 1.
    """
    # How many rounds has a ring, and how many bytes does a rank send in them?
    # answer: begin
    rounds = 2 * (n - 1)
    seconds = rounds * latency + rounds / n * nbytes / bandwidth
    return max(1, ceil(seconds / compute))
    # answer: end


_LINKS = {
    "a quick link": (1e6, 4, 1e11, 0.0, 1.0),
    "two ranks": (4e9, 2, 1.25e7, 0.0, 3.0),
    "eight ranks": (4e9, 8, 1.25e8, 0.0, 0.7),
    "few bytes": (8, 64, 1e12, 0.02, 0.11),
}
_MEETINGS = {"the mean of the ranks": (1.0, 0.0), "with momentum": (0.5, 0.75)}  # lr, momentum
EXERCISES = (
    Exercise(outer_step, cases(_MEETINGS), use=_met, close=1e-6),
    Exercise(send_largest, named_cases("{} of {}", (2, 6), (1, 9), (4, 4)), use=_sent, close=1e-12),
    Exercise(steps_between, cases(_LINKS), given="from math import ceil"),
)
