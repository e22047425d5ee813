"""Lesson 03, naive data parallelism: the mean of gradients for any model, and for batches of any sizes."""

import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.course.exercise import Exercise


def average_gradients(model):
    """Replace the gradient of every trainable parameter by its mean over all ranks.

    Where a rank did not use a parameter, its `.grad` is None: count it as zeros.
    Leave frozen parameters (`requires_grad=False`) alone. Divide before adding: in half
    precision a sum can be infinite.
    Cost: one all-reduce for each trainable parameter.
    """
    world_size = dist.get_world_size()
    # Which ranks have to take part in a parameter's all-reduce, and what do they bring?
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        parameter.grad /= world_size
        dist.all_reduce(parameter.grad)


def _after_backward(at):
    for case, frozen, with_head in (
        ("all ranks use everything", False, True),
        ("the body is frozen, rank 0 leaves the head out", True, at.rank > 0),
        ("the body is frozen, no rank uses the head", True, False),
    ):
        model = _with_gradients(at)
        if frozen:
            model["body"].requires_grad_(False).weight.grad = None  # the bias has one from before it was frozen
        if not with_head:
            model["head"].zero_grad()
        yield case, (model,)
    half = nn.Linear(2, 1, bias=False).half()
    half.weight.grad = torch.full_like(half.weight, 40_000.0 if at.rank else 30_000.0)
    yield "half precision, large gradients", (half,)


def _with_gradients(at):
    """Four layers, of which two share a weight, with gradients as after a backward."""
    model = nn.ModuleDict({name: nn.Linear(3, 3, bias=name == "body") for name in ("body", "first", "second", "head")})
    model["second"].weight = model["first"].weight
    for parameter in model.parameters():
        parameter.grad = torch.randn(at.n, *parameter.shape)[at.rank]
    return model


def average_unequal(model, items):
    """Replace every gradient by that of the mean loss over all ranks' items.

    items: how many this rank had; 0 on some ranks, not on all. Before, gradients are
    those of the mean loss over its own items; without items they are None, zeros or
    NaN, and the rank takes part all the same.
    Cost: one all-reduce for each parameter (all are trainable), and one of one number.
    """
    # Which share of the whole batch's mean is this rank's?
    total = torch.tensor(items, device=next(model.parameters()).device)
    dist.all_reduce(total)
    for parameter in model.parameters():
        if items == 0:
            parameter.grad = torch.zeros_like(parameter)  # not 0 * NaN, which is NaN
        parameter.grad *= items / total.item()
        dist.all_reduce(parameter.grad)


def _unequal_batches(at):
    for case, items, without in (
        ("rank r has 2r + 1 items", 2 * at.rank + 1, None),
        ("rank 0 has no items, its gradients are NaN", at.rank, torch.nan),
        ("rank 0 has no items and no gradients", at.rank, None),
    ):
        model = _with_gradients(at)
        for parameter in model.parameters() if items == 0 else ():
            parameter.grad = without and torch.full_like(parameter, without)
        yield case, (model, items)


EXERCISES = (
    Exercise(average_gradients, _after_backward, close=1e-5),
    Exercise(average_unequal, _unequal_batches, close=1e-5),
)
