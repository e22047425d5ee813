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
    # answer: begin
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        parameter.grad /= world_size
        dist.all_reduce(parameter.grad)
    # answer: end


def average_unequal(model, items):
    """Replace every gradient by that of the mean loss over all ranks' items.

    Before, it is that of the mean over this rank's `items`, which is their number.
    Without items, a rank has None, zeros or NaN for gradients. It still takes part.
    Cost: one all-reduce for each parameter (all are trainable), and one of one number.
    """
    # Which share of the whole batch's mean is this rank's?
    # answer: begin
    total = torch.tensor(items, device=next(model.parameters()).device)
    dist.all_reduce(total)
    for parameter in model.parameters():
        if items == 0:
            parameter.grad = torch.zeros_like(parameter)  # not 0 * NaN, which is NaN
        parameter.grad *= items / total.item()
        dist.all_reduce(parameter.grad)
    # answer: end


class Net(nn.Module):
    """Two layers that share a weight, and a head that a rank may leave out. `body` may be frozen."""

    def __init__(self):
        super().__init__()
        self.body, self.first, self.second, self.head = (nn.Linear(3, 3) for _ in range(4))
        self.second.weight = self.first.weight

    def forward(self, x, with_head=True):
        x = self.second(self.first(self.body(x)).tanh())
        return self.head(x) if with_head else x


def backward(model, rank, items, with_head=True):
    """Leave the gradients of this rank's mean loss over so many items in the model."""
    x = torch.randn(items, 3, generator=torch.Generator().manual_seed(rank))
    model(x, with_head).square().mean().backward()


def after_backward(at):
    """All parameters used; then a frozen layer, and a head that not all ranks use, and one that none uses."""
    skipped = {
        "all ranks use everything": (),
        "the body is frozen, rank 0 leaves the head out": (0,),
        "the body is frozen, no rank uses the head": range(at.n),
    }
    for case, without_head in skipped.items():
        model = Net()
        model.body.requires_grad_(not without_head)
        if without_head:
            model.body.bias.grad = torch.full((3,), at.rank + 1.0)  # from before it was frozen
        backward(model, at.rank, 4, at.rank not in without_head)
        yield case, (model,)
    half = nn.Linear(2, 1, bias=False).half()
    half.weight.grad = torch.full_like(half.weight, 40_000.0 if at.rank else 30_000.0)
    yield "half precision, large gradients", (half,)


def unequal_batches(at):
    """As many items on all ranks, then different numbers, then a rank that has none."""
    sizes = {
        "4 items on each rank": [4] * at.n,
        "rank r has 2r + 1 items": [2 * rank + 1 for rank in range(at.n)],
        "rank 0 has no items, its gradients are NaN": [0, *range(3, at.n + 2)],
        "rank 0 has no items and no gradients": [0, *range(3, at.n + 2)],
    }
    for case, items in sizes.items():
        model = Net()
        if items[at.rank]:
            backward(model, at.rank, items[at.rank])
        elif "NaN" in case:  # as after the mean of no losses
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, torch.nan, requires_grad=False)
        yield case, (model, items[at.rank])


EXERCISES = (
    Exercise(average_gradients, after_backward, close=1e-5),
    Exercise(average_unequal, unequal_batches, close=1e-5),
)
