"""Lesson 14, tensor parallelism: what stands around sliced layers, a fused weight, a loss of sliced logits."""

import torch
import torch.distributed as dist

from scratch_ddp.course.exercise import Exercise


def f_and_g(group=None):
    """Return f and g, two functions of a tensor that may need a gradient.

    f: forward unchanged, backward sums the gradients over the ranks. g: forward sums
    over the ranks, backward unchanged. Change no tensor you were given.
    Cost: one all-reduce in f's backward, one in g's forward.
    """
    # A class made from torch.autograd.Function has two static methods, forward(ctx, x)
    # and backward(ctx, gradient). You call it as TheClass.apply(x). Which of the four
    # methods sends something?

    def add_up(tensor):
        total = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    class F(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, gradient):
            return add_up(gradient)

    class G(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            return add_up(y)

        @staticmethod
        def backward(ctx, gradient):
            return gradient

    return F.apply, G.apply


def _passed_through(answer):
    rank, functions = dist.get_rank(), answer()
    for name, function in zip("fg", functions, strict=True):
        leaf = (torch.arange(6.0).view(2, 3) + 10**rank).requires_grad_()
        x = leaf * 1
        y = function(x)
        yield "value", f"{name}(x)", y
        yield "untouched", f"x after {name}(x)", x
        gradient = torch.full((2, 3), rank + 1.0)
        y.backward(gradient)
        yield "value", f"x's gradient through {name}", leaf.grad
        yield "untouched", f"the gradient that {name}'s backward was given", gradient


def slice_qkv(weight, heads, kv_heads, rank, n):
    """Return this rank's rows of a fused weight: its heads of q, then of k, then of v.

    The rows of `weight` are `heads` heads of q, `kv_heads` of k and as many of v, all
    of one size. n divides both numbers; rank 0 has the first heads of each.
    """
    # How many rows has a head? Where do k and v begin?
    rows = len(weight) // (heads + 2 * kv_heads)
    parts = weight.split([heads * rows, kv_heads * rows, kv_heads * rows])
    return torch.cat([part.chunk(n)[rank] for part in parts])


def sliced_cross_entropy(logits, targets, group=None):
    """Return the mean loss of all tokens, and its gradient for `logits`: a list of two.

    logits: (tokens, vocabulary / n), this rank's columns; exp() of them can be inf.
    targets: numbers in the whole vocabulary, of which rank 0 has the first columns.
    Gradient: (softmax - 1 at the target) / tokens.
    Cost: two all-reduces, of three numbers a token together.
    """
    tokens, columns = logits.shape
    # Which three numbers of a token does a rank need from the others?
    largest = logits.amax(dim=1)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    exps = (logits - largest[:, None]).exp()
    here = targets - columns * dist.get_rank(group)  # the target's place in this rank's columns
    mine = ((here >= 0) & (here < columns)).nonzero().flatten()
    terms = logits.new_zeros(2, tokens)
    terms[0] = exps.sum(dim=1)
    terms[1, mine] = logits[mine, here[mine]] - largest[mine]
    dist.all_reduce(terms, group=group)
    gradient = exps.div_(terms[0, :, None])
    gradient[mine, here[mine]] -= 1
    return [(terms[0].log() - terms[1]).mean(), gradient.div_(tokens)]


def _logits(at):
    columns = 3
    logits, targets = torch.randn(7, columns * at.n, dtype=torch.float64), torch.randint(columns * at.n, (7,))
    targets[:3] = torch.tensor([0, columns, columns * at.n - 1])
    mine = logits.split(columns, dim=1)[at.rank]
    yield "small logits", (mine.clone(), targets.clone())
    yield "logits of about 1,000, and far below", (1000 + mine - 2000.0 * at.rank, torch.zeros_like(targets))


def _both(answer, logits, targets):
    loss, gradient = answer(logits, targets)
    yield "value", "the loss", loss
    yield "value", "the gradient", gradient


_FUSED = {
    f"{q} heads of q, {k} of k and v, rank {rank} of {n}": (torch.arange(6.0 * (q + 2 * k)).view(-1, 3), q, k, rank, n)
    for q, k, rank, n in ((4, 4, 1, 2), (8, 2, 0, 2), (8, 4, 2, 4))
}
EXERCISES = (
    Exercise(f_and_g, {"a matrix": ()}, use=_passed_through),
    Exercise(slice_qkv, _FUSED),
    Exercise(sliced_cross_entropy, _logits, use=_both, close=1e-9),
)
