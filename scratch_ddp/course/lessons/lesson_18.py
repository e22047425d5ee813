"""Lesson 18, seldom: DiLoCo's outer step, error feedback, and how seldom a link needs it."""

from math import ceil

import torch
import torch.distributed as dist

from scratch_ddp.course.exercise import Exercise


def outer_step(params, agreed, velocity, lr, momentum):
    """Let the ranks meet: a step of Nesterov along the mean way that they have gone.

    params: what this rank has. agreed: what all had when they last met. The gradient is
    the mean over ranks of agreed - params. velocity becomes momentum · velocity +
    gradient; then agreed becomes agreed - lr · (gradient + momentum · velocity), and
    params the same. Cost: one all-reduce for each parameter.
    """
    # In which direction does agreed - params point, and in which a gradient?
    for mine, last, speed in zip(params, agreed, velocity, strict=True):
        gradient = (last - mine) / dist.get_world_size()
        dist.all_reduce(gradient)
        speed.mul_(momentum).add_(gradient)
        last.sub_(lr * (gradient + momentum * speed))
        mine.copy_(last)


def _meetings(at):
    for case, lr, momentum in (("the mean of the ranks", 1.0, 0.0), ("with momentum", 0.5, 0.75)):
        agreed, velocity, way = (2.0 * torch.arange(18.0).view(3, 2, 3)).unbind()
        yield case, ([agreed - (at.rank + 1) * way], [agreed], [velocity], lr, momentum)


def send_largest(gradient, residual, k):
    """Replace gradient by the mean of what the ranks send: the k largest of each.

    Both tensors have one dimension. residual holds what this rank has not sent so far:
    add it to gradient first, and leave in it what is not sent now. Largest means by
    absolute value; what a rank does not send counts as 0. Cost: two all-gathers of k.
    """
    # What is left of the sum when the k entries have gone?
    residual += gradient
    places = residual.abs().topk(k).indices
    values = residual[places]
    residual[places] = 0

    n = dist.get_world_size()
    all_values, all_places = values.new_empty(n * k), places.new_empty(n * k)
    dist.all_gather(list(all_values.split(k)), values)
    dist.all_gather(list(all_places.split(k)), places)
    gradient.zero_().index_add_(0, all_places, all_values / n)


def _gradients(at):
    for size, k in ((6, 2), (9, 1), (4, 4)):
        gradient, residual = torch.randn(at.n, 2, size).double()[at.rank]
        yield f"{k} of {size}", (gradient, residual, k)


def steps_between(nbytes, n, bandwidth, latency, compute):
    """Return the least number of steps from one meeting to the next that hides it.

    Hidden: the ring all-reduce of nbytes over n ranks takes no longer than the steps,
    of compute seconds each. A link carries bandwidth bytes in a second, and each of the
    ring's rounds takes latency seconds more. The least is 1.
    """
    # How many rounds has a ring, and how many bytes does a rank send in them?
    rounds = 2 * (n - 1)
    seconds = rounds * latency + rounds / n * nbytes / bandwidth
    return max(1, ceil(seconds / compute))


_LINKS = ((1e6, 4, 1e11, 0.0, 1.0), (4e9, 2, 1.25e7, 0.0, 3.0), (4e9, 8, 1.25e8, 0.0, 0.7), (8, 64, 1e12, 0.02, 0.11))
EXERCISES = (
    Exercise(outer_step, _meetings, close=1e-6),
    Exercise(send_largest, _gradients, close=1e-12),
    Exercise(steps_between, _LINKS, given="from math import ceil"),
)
