"""Lesson 09, how large a message: gradients that travel in buckets, and through a buffer that is allocated once."""

import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.course.exercise import Exercise
from scratch_ddp.course.lessons import overlap


def average_in_buckets(buckets):
    """Have the gradients of each bucket (a list of parameters) averaged in backward.

    Return a function `finish`: after backward and finish(), in each step, gradients are
    means. They may arrive in another order on each rank.
    Cost: one all-reduce a bucket, started when the gradients of this bucket and of all
    before it are complete. Only finish() waits.
    """
    missing = [len(bucket) for bucket in buckets]  # how many gradients each waits for
    on_the_way = []
    # What does a hook need to know about its parameter? Which bucket may start now?
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

    # end of the answer
    return finish


def _in_steps(answer, swapped):
    """A layer, then two side by side. Whichever was used last has its gradients first: another one on odd ranks."""
    model = nn.ModuleDict({name: nn.Linear(4, 4).double() for name in ("below", "left", "right")})
    batches = torch.randn(dist.get_world_size(), 2, 5, 4).double()[dist.get_rank()]
    order = ("right", "left") if swapped and dist.get_rank() % 2 else ("left", "right")
    below, left, right = (list(layer.parameters()) for layer in model.values())
    finish = answer([right, left, below])

    def loss(x):
        x = model["below"](x)
        return sum(model[name](x).square().mean() for name in order)

    for number, batch in enumerate(batches):
        yield from overlap(f"step {number}", model["below"], loss, batch)
        finish()
        yield "value", f"step {number}", model
        model.zero_grad(set_to_none=swapped)


def average_through_buffer(parameters):
    """Keep one tensor for the gradients of all parameters, one after another.

    Return a function `average`. Called after backward, it leaves the means in `.grad`,
    as views of that tensor. Gradients may have been set to None, to zeros, or kept:
    then new means are added to the old.
    Cost: one all-reduce a call. Memory: after the first call, no new tensors.
    """
    # Where is a gradient when average() is called, after zero_grad() and without it?
    sizes = [parameter.numel() for parameter in parameters]
    buffer = parameters[0].new_zeros(sum(sizes))
    parts = buffer.split(sizes)
    views = [part.view_as(each) for each, part in zip(parameters, parts, strict=True)]

    def average():
        for parameter, view in zip(parameters, views, strict=True):
            torch.div(parameter.grad, dist.get_world_size(), out=view)  # also if it is the view
        dist.all_reduce(buffer)
        for parameter, view in zip(parameters, views, strict=True):
            parameter.grad = view

    # end of the answer
    return average


def _through_buffer(answer):
    parameters = [nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for shape in ((3, 4), (5,))]
    average, kept = answer(parameters), []
    for cleared in ("set to None", "set to zeros", "set to zeros again", "not cleared", "set to None again"):
        for parameter in parameters:
            if "None" in cleared:
                parameter.grad = None
            elif "zeros" in cleared:
                parameter.grad.zero_()
            gradient = torch.randn(dist.get_world_size(), *parameter.shape)[dist.get_rank()]
            (parameter * gradient).sum().backward()
        average()
        yield "value", f"gradients {cleared}", parameters
        kept += [parameter.grad for parameter in parameters]  # so that no memory is used twice
        seen = {each.untyped_storage().data_ptr() for each in kept}
        yield "memory", f"gradients {cleared}: the number of tensors that they have been views of", len(seen)


_ORDERS = {"the same order on all ranks": (False,), "another order on odd ranks": (True,)}
EXERCISES = (
    Exercise(average_in_buckets, _ORDERS, use=_in_steps, close=1e-9),
    Exercise(average_through_buffer, {"five steps": ()}, use=_through_buffer, close=1e-9),
)
