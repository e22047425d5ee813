"""Lesson 11b, recomputation: a checkpoint by hand, and which blocks to recompute under a budget."""

from itertools import combinations

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from scratch_ddp.course.exercise import Exercise


def checkpointed(function, x):
    """Return function(x), a tensor. Backward calls function again.

    x requires a gradient. It gets the gradient that function(x) would give it, and so
    does every parameter that function uses. If it draws random numbers, both calls draw
    the same, and what is drawn afterwards is as after one call of function(x). Memory:
    for backward, only x and the state of the CPU's random generator are kept.
    """
    # What must backward know to repeat the forward exactly?

    class Checkpointed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            ctx.random = torch.get_rng_state()
            return function(x)

        @staticmethod
        def backward(ctx, gradient):
            (x,) = ctx.saved_tensors
            with torch.random.fork_rng(devices=[]), torch.enable_grad():
                torch.set_rng_state(ctx.random)
                again = x.detach().requires_grad_()
                function(again).backward(gradient)
            return again.grad

    return Checkpointed.apply(x)


def _blocks(at):
    block = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 6)).double()
    yield "one block", ([block],)
    two = [nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Dropout(0.5), nn.Linear(24, 6)) for _ in range(2)]
    yield "two blocks with dropout", ([block.double() for block in two],)


def _trained(answer, blocks):
    x = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    kept, y = [], x

    def keep(tensor):
        kept.append(tensor.numel() * tensor.is_floating_point())  # the random numbers' state may be kept, too
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        for block in blocks:
            y = answer(block, y)
    yield "value", "the output", y.detach()
    yield "memory", "the number of elements kept for backward", max(sum(kept), len(blocks) * x.numel())
    (y * torch.arange(1.0, 7.0, dtype=y.dtype)).sum().backward()
    yield "value", "the gradient of x", x.grad
    for number, block in enumerate(blocks):
        yield "value", f"block {number}", block
    yield "next", "the number drawn afterwards", torch.rand(1).item()


def choose_blocks(saved, seconds, budget):
    """Return a list of blocks to recompute that takes the fewest seconds.

    Block i keeps saved[i] bytes for backward beside its input. If it is recomputed, it
    keeps its input alone and takes seconds[i] longer. What the others keep is at most
    budget bytes; what a block needs while it is recomputed is left out. Blocks are
    numbered from 0, twelve at most; any order will do.
    """
    # Which sets of blocks leave no more than the budget?
    blocks = range(len(saved))
    fewest = None
    for count in range(len(saved) + 1):
        for some in combinations(blocks, count):
            kept = sum(saved[i] for i in blocks if i not in some)
            longer = sum(seconds[i] for i in some)
            if kept <= budget and (fewest is None or longer < fewest[0]):
                fewest = longer, list(some)
    return fewest[1]


def _least(answer, saved, seconds, budget):
    chosen = answer(saved, seconds, budget)
    kept = sum(saved) - sum(saved[i] for i in {*chosen})
    yield "valid", "what the other blocks keep, or the budget if it is less,", max(kept, budget)
    yield "time", "the time of the recomputed blocks", sum(seconds[i] for i in chosen)


_BUDGETS = (
    ([16] * 6, [3] * 6, 40),
    ([16, 8, 8], [1, 1, 1], 32),  # everything fits, exactly
    ([16, 8, 8], [1, 2, 1], 0),
    ([60, 50, 50], [11, 10, 10], 60),  # the block that frees most a second is too small
    ([30, 20, 20], [10, 4, 4], 40),  # one large block in place of two
    ([7, 3, 9, 4, 8, 6, 5, 10, 2, 11], [6, 3, 7, 5, 9, 4, 6, 8, 1, 9], 31),
)
EXERCISES = (
    Exercise(checkpointed, _blocks, use=_trained, close=1e-9),
    Exercise(choose_blocks, _BUDGETS, use=_least, given="from itertools import combinations"),
)
