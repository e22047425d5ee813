"""Lesson 14, tensor parallelism: what stands around sliced layers, and a loss of sliced logits."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from scratch_ddp.course.exercise import Exercise
from scratch_ddp.course.guard import GRADIENTS
from scratch_ddp.course.trial import Trial
from scratch_ddp.instruments.traffic import ring_bytes

ELEMENT = 8  # bytes of a float64
HEAD = 4  # features of a head
Weights = list[torch.Tensor]


def f_and_g(group=None):
    """Return two functions of a tensor: f for the input of column-cut layers, g for the output of
    row-cut ones.

    f(x) has the values of x; in backward the gradients of all ranks in `group` are added up.
    g(y) is the sum of all ranks' y, the same bits on each; in backward the gradient passes as it is.
    The tensors and gradients that they get stay as they are.
    Cost: f one all-reduce, in backward; g one all-reduce, in forward.
    """
    # A class made from torch.autograd.Function has forward(ctx, x) and backward(ctx, gradient), both
    # static methods. You call it as TheClass.apply(x). Which of the four methods sends something?
    # answer: begin

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
    # answer: end


def sliced_cross_entropy(logits, targets, group=None):
    """Return a list of two tensors: the mean loss of all tokens, and its gradient for `logits`.

    logits: (tokens, vocabulary / n), this rank's columns: rank 0 of `group` has the first ones.
    targets: (tokens,), numbers in the whole vocabulary, the same on every rank.
    Loss of a token: log(sum of exp(logit) over the vocabulary) - logit of its target. Logits can be
    large: exp(1000) is inf. Gradient: (softmax - 1 at the target) / tokens, this rank's columns.
    Cost: two all-reduces, of three numbers a token together.
    Memory: beside the arguments, three times the size of `logits` and 16 numbers a token.
    Everything is computed in the dtype of `logits`.
    """
    tokens, columns = logits.shape
    # Which three numbers of a token does a rank need from the others?
    # answer: begin
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
    # answer: end


def _random(trial: Trial, seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(trial.device)


def examine_f_and_g(trial: Trial) -> None:
    """V and untouched for each function alone; V, A and C for an attention and an MLP, twice."""
    _examine_each(trial)
    n, width = trial.size, HEAD * 2 * trial.size
    shapes = [(width, width)] * 4 + [(width, 2 * width), (2 * width, width)]
    whole = [_random(trial, seed, *shape) / width**0.5 for seed, shape in enumerate(shapes)]
    cuts = [1, 1, 1, 0, 1, 0]  # q, k, v, o; up, down
    sliced = [each.chunk(n, dim)[trial.rank].clone().requires_grad_() for each, dim in zip(whole, cuts, strict=True)]
    for step in range(2):
        x = torch.randn(2, 3, width, generator=trial.generator(), dtype=torch.float64).to(trial.device) + step
        expected_y, expected = _alone(whole, x)
        x.requires_grad_()
        y = trial.call(x, sliced, case=f"a block, pass {step}, drawn with seed {trial.seed}, forward", using=_block)
        trial.value(y, expected_y, "the output", tolerance=1e-12)
        trial.agreement(y)
        trial.cost(calls={"all_reduce": 2}, exactly=True)
        trial.call(
            y,
            x,
            sliced,
            case=f"a block, pass {step}, drawn with seed {trial.seed}, backward",
            using=_backward,
            changes=[GRADIENTS, x, *sliced],
        )
        trial.cost(calls={"all_reduce": 2}, exactly=True)
        trial.value(x.grad, expected[-1], "the input's gradient", tolerance=1e-12)
        trial.agreement(x.grad)
        for name, weight, gradient, dim in zip(
            ("q", "k", "v", "o", "up", "down"), sliced, expected, cuts, strict=False
        ):
            mine = gradient.chunk(n, dim)[trial.rank].contiguous()
            trial.value(weight.grad, mine, f"the gradient of {name}'s slice", tolerance=1e-12)
            weight.grad = None


def _examine_each(trial: Trial) -> None:
    """Whole numbers: each rank's own, moved forward and backward, beside another use of the same tensor."""
    own, total = float(trial.rank + 1), float(sum(range(1, trial.size + 1)))
    row = torch.arange(1.0, 4.0, dtype=torch.float64, device=trial.device)
    for place, (name, forward, backward) in enumerate((("f", own, total + own), ("g", total, 2 * own))):
        x = (own * row).requires_grad_()
        result = trial.call(x, case=f"{name} alone, forward", using=lambda answer, x, i=place: answer()[i](x))
        trial.value(result, forward * row, f"what {name} returns")
        trial.cost(calls={"all_reduce": place}, exactly=True)
        x, y = (own * row).requires_grad_(), own * row
        found = trial.call(
            x, y, case=f"{name} alone, backward", using=lambda answer, x, y, i=place: _twice(answer()[i], x, y)
        )
        trial.value(found, backward * row, f"the gradient of x, where x + {name}(x) has the gradient y")
        trial.cost(calls={"all_reduce": 1}, exactly=True)


def _twice(function: Callable, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The gradient of x, which goes into a sum directly and through the function."""
    (gradient,) = torch.autograd.grad(x + function(x), x, y)
    return gradient


def _block(answer: Callable, x: torch.Tensor, weights: Weights) -> torch.Tensor:
    f, g = answer()
    return _compute(x, weights, f, g)


def _compute(x: torch.Tensor, weights: Weights, f: Callable, g: Callable) -> torch.Tensor:
    """An attention of as many heads as fit into the weights, and an MLP."""
    *qkv, o, up, down = weights
    h = f(x)
    q, k, v = ((h @ weight).unflatten(-1, (-1, HEAD)).transpose(1, 2) for weight in qkv)
    heads = scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
    x = x + g(heads @ o)
    return x + g(torch.tanh(f(x) @ up) @ down)


def _alone(weights: Weights, x: torch.Tensor) -> tuple[torch.Tensor, Weights]:
    """The output of one process, and the gradients of the weights and of x."""
    weights = [weight.clone().requires_grad_() for weight in weights]
    x = x.clone().requires_grad_()
    y = _compute(x, weights, lambda x: x, lambda y: y)
    return y.detach(), list(torch.autograd.grad(y.square().sum(), [*weights, x]))


def _backward(_: Callable, y: torch.Tensor, x: torch.Tensor, weights: Weights) -> None:
    y.square().sum().backward()


_LOGITS = {  # case: (tokens, columns of a rank, scale of all logits, added to the last rank's, dtype)
    "logits about 1": (12, 60, 1.0, 0.0, torch.float64),
    "logits about 1000": (12, 60, 1000.0, 0.0, torch.float64),
    "the last rank's logits larger": (12, 60, 1.0, 900.0, torch.float64),
    "all logits below -1000": (12, 45, 1.0, -2000.0, torch.float64),
    "float32": (24, 31, 1.0, 0.0, torch.float32),
}


def examine_sliced_cross_entropy(trial: Trial) -> None:
    """V against one process, for logits small, large and largest on one rank, and in float32; C; M."""
    n, rank, generator = trial.size, trial.rank, trial.generator()
    for case, (tokens, columns, scale, shift, dtype) in _LOGITS.items():
        whole = scale * torch.randn(tokens, n * columns, generator=generator, dtype=torch.float64)
        whole[:, 0 if shift < 0 else (n - 1) * columns :] += shift
        whole = whole.to(trial.device, dtype)
        targets = torch.randint(n * columns, (tokens,), generator=generator)
        edges = torch.arange(min(tokens, 2 * n))  # the first and the last column of each rank
        targets[: len(edges)] = edges // 2 * columns + edges % 2 * (columns - 1)
        logits, targets = whole.chunk(n, dim=1)[rank].clone(), targets.to(trial.device)
        mine = targets.clone()  # what is expected comes from the others
        result = trial.call_within(
            3 * logits.numel() + 16 * tokens,
            logits,
            mine,
            case=f"{case}, drawn with seed {trial.seed}",
            note=f"the slice has {logits.numel()}, the whole logits {whole.numel()}",
        )
        whole.requires_grad_()
        loss = cross_entropy(whole, targets)
        (gradient,) = torch.autograd.grad(loss, whole)
        expected = [loss.detach(), gradient.chunk(n, dim=1)[rank].contiguous()]
        trial.value(result, expected, "the list of loss and gradient", 1e-12 if dtype == torch.float64 else 1e-5)
        wire = ring_bytes("all_reduce", tokens * logits.element_size(), n, rank)
        trial.cost(calls={"all_reduce": 2}, max_wire_bytes=3 * wire)


F_AND_G = Exercise(f_and_g, examine_f_and_g)
SLICED_CROSS_ENTROPY = Exercise(sliced_cross_entropy, examine_sliced_cross_entropy)
EXERCISES = (F_AND_G, SLICED_CROSS_ENTROPY)
