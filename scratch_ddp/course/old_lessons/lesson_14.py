"""Lesson 14, tensor parallelism: what stands around sliced layers, and a loss of sliced logits."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from scratch_ddp.course.exercise import Exercise
from scratch_ddp.course.guard import GRADIENTS
from scratch_ddp.course.inputs.every_kind import WIDE
from scratch_ddp.course.trial import Trial
from scratch_ddp.instruments.traffic import ring_bytes

ELEMENT = 8  # bytes of a float64
HEAD = 4  # features of a head
Weights = list[torch.Tensor]
Named = dict[str, torch.Tensor]


def f_and_g(group=None):
    """Return two functions of a tensor: f for the input of column-cut layers, g for the output of
    row-cut ones. `group`: the ranks that share the layers, all if None.

    f(x) has the values of x; in backward x gets the sum of all ranks' gradients.
    g(y) is the sum of all ranks' y, the same bits on each; in backward the gradient passes as it is.
    Tensors and gradients have any floating dtype, shape and strides, the same on all ranks, and any
    values, NaN too. They stay as they are, and so do results when f or g is used again. Both take
    tensors that need no gradient, on some ranks or on all, and g adds those up as well. The
    backward of f runs on all ranks or on none.
    Cost: f one all-reduce, in backward; g one all-reduce, in forward: of the tensor's bytes.
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

    logits: (tokens, vocabulary / n), this rank's columns: rank 0 of `group` has the first ones. They
    need no gradient. Any strides. targets: (tokens,), int64, numbers in the whole vocabulary, the same
    on every rank. Both stay as they are.
    Loss of a token: log(sum of exp(logit) over the vocabulary) - logit of its target. Logits can be
    large: exp(1000) is inf. They can be -inf, all of a rank's too, where the vocabulary is padded.
    Gradient: (softmax - 1 at the target) / tokens, this rank's columns.
    All in the dtype of `logits`. Cost: two all-reduces, of three numbers a token together.
    Memory: beside the arguments, three times the size of `logits`, and 16 numbers of 8 bytes a token.
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
    for place, name in enumerate("fg"):
        _examine_alone(trial, place, name)
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
        names = ("q", "k", "v", "o", "up", "down")
        for name, weight, gradient, dim in zip(names, sliced, expected, cuts, strict=False):
            mine = gradient.chunk(n, dim)[trial.rank].contiguous()
            trial.value(weight.grad, mine, f"the gradient of {name}'s slice", tolerance=1e-12)
            weight.grad = None


def _examine_alone(trial: Trial, place: int, name: str) -> None:
    """Tensors of every kind, each moved twice: where none needs a gradient, and where rank 0's do; backward."""
    everyones = [_of_every_kind(rank, trial.device) for rank in range(trial.size)]
    mine, uses = everyones[trial.rank], 2 * len(everyones[0])
    totals = {kind: sum(each[kind] for each in everyones) for kind in mine}
    wire = max(
        sum(2 * ring_bytes("all_reduce", tensor.nbytes, trial.size, rank) for tensor in mine.values())
        for rank in range(trial.size)
    )
    forward, backward = ((mine, totals), (totals, mine))[place]
    for who in ("no rank's", "rank 0's"):
        needs = who == "rank 0's" and trial.rank == 0
        tensors = {kind: tensor.detach().requires_grad_(needs) for kind, tensor in mine.items()}
        case = f"{name} alone, used {uses} times where {who} tensors need gradients"
        with torch.set_grad_enabled(who != "no rank's"):
            results = trial.call(
                case=case, beside=[tensors], using=lambda answer, xs=tensors: _twice(answer()[place], xs)
            )
        for kind, expected in forward.items():
            trial.value(results[kind], [expected, 2 * expected], f"[{name}(x), {name}(2 x)] for {kind}")
        trial.cost(calls={"all_reduce": uses * place}, max_wire_bytes=wire, exactly=True)
        trial.end_if_wrong()  # a rank that sends nothing would be waited for
    known = {
        "tensors": {kind: tensor.detach().requires_grad_() for kind, tensor in mine.items()},
        "gradients": {kind: tensor.clone() for kind, tensor in mine.items()},
    }
    case = f"{name} alone, used {uses} times, with backward"
    found = trial.call(case=case, beside=[known], using=lambda answer: _gradients(answer()[place], **known))
    for kind, expected in backward.items():
        what = (
            f"the gradient of x, which {name} is applied to twice, with gradients y and 3 y of the results, for {kind}"
        )
        trial.value(found[kind], 4 * expected, what)
    trial.cost(calls={"all_reduce": uses}, max_wire_bytes=wire, exactly=True)


def _of_every_kind(rank: int, device: torch.device) -> Named:
    """Numbers that add up exactly, in every order, for up to eight ranks."""
    own, last = rank + 1.0, rank > 0
    tensors = {
        "a vector": torch.tensor([1.0, 2.0, 3.0]) * own,
        "two rows of many columns": torch.arange(2.0 * WIDE).view(2, WIDE) * own,
        "float64": torch.tensor([[1 + 2.0**-40, 2.0**-800]], dtype=torch.float64) * own,
        "2 × 3 × 2 in bfloat16": (torch.arange(12, dtype=torch.bfloat16) % 2).view(2, 3, 2) * own,
        "four dimensions": torch.arange(8.0).view(2, 2, 1, 2) - own,
        "a transposed matrix": (torch.arange(6.0).view(2, 3) * own).t(),
        "one number, expanded": torch.tensor(own).expand(2, 2),
        "a number without dimensions": torch.tensor(own),
        "an empty matrix": torch.zeros(0, 3),
        "NaN, inf and 3e38": torch.tensor([torch.nan if last else 1.0, torch.inf, -torch.inf if last else 1.0, 3e38]),
    }
    return {kind: tensor.to(device) for kind, tensor in tensors.items()}


def _twice(function: Callable, tensors: Named) -> dict[str, Weights]:
    return {kind: [function(x), function(2 * x)] for kind, x in tensors.items()}


def _gradients(function: Callable, tensors: Named, gradients: Named) -> dict[str, torch.Tensor | None]:
    """Of each x, which the function is applied to twice; None where a result does not depend on it."""
    found: dict[str, torch.Tensor | None] = dict.fromkeys(tensors)
    for kind, x in tensors.items():
        results = [function(x), function(x)]
        if all(result.requires_grad for result in results):
            found[kind] = torch.autograd.grad(results, x, [gradients[kind], 3 * gradients[kind]], allow_unused=True)[0]
    return found


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


def examine_sliced_cross_entropy(trial: Trial) -> None:
    """V against one process; C; M."""
    n, rank = trial.size, trial.rank
    for case, (whole, targets) in _batches(n, trial.generator()).items():
        whole, targets = whole.to(trial.device), targets.to(trial.device)
        logits, tokens = whole.chunk(n, dim=1)[rank], len(targets)
        logits = logits.T.contiguous().T if "transposed" in case else logits.contiguous()
        result = trial.call_within(
            3 * logits.nbytes // ELEMENT + 16 * tokens,
            logits,
            targets.clone(),  # what is expected comes from the others
            case=f"{case}, drawn with seed {trial.seed}",
            note=f"the slice has {logits.numel()}, the whole logits {whole.numel()}",
        )
        whole.requires_grad_()
        loss = cross_entropy(whole, targets)
        (gradient,) = torch.autograd.grad(loss, whole)
        expected = [loss.detach(), gradient.chunk(n, dim=1)[rank].contiguous()]
        trial.value(result, expected, "the list of loss and gradient", 1e-12 if loss.dtype == torch.float64 else 1e-5)
        sizes = [numbers * tokens * logits.element_size() for numbers in (1, 2)]
        wire = [sum(ring_bytes("all_reduce", size, n, each) for size in sizes) for each in range(n)]
        trial.cost(calls={"all_reduce": 2}, max_wire_bytes=max(wire))


def _batches(n: int, generator: torch.Generator) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """By case: whole logits, and targets, of which some are the first and the last column of each rank."""

    def drawn(tokens: int, columns: int, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
        whole = scale * torch.randn(tokens, n * columns, generator=generator, dtype=torch.float64)
        targets = torch.randint(n * columns, (tokens,), generator=generator)
        edges = torch.arange(min(tokens, 2 * n))
        targets[: len(edges)] = edges // 2 * columns + edges % 2 * (columns - 1)
        return whole, targets

    cases = {
        "logits about 1": drawn(12, 60),
        "logits about 1000": drawn(12, 60, 1000.0),
        "transposed logits, the last rank's larger, one target for all tokens": drawn(9, 60),
        "all logits below -1000": drawn(12, 45),
        "float32, -inf for the last rank's columns": drawn(24, 31),
        "one token, one column a rank": drawn(1, 1),
        "70,001 tokens, one column a rank": drawn(70_001, 1),
        "NaN in one token": drawn(5, 40),
    }
    for case, (whole, targets) in cases.items():
        columns = whole.shape[1] // n
        if "larger" in case:
            whole[:, -columns:] += 900
            targets.fill_(3)
        elif "below" in case:
            whole.sub_(2000)
        elif "-inf" in case and n > 1:  # else there are no other columns
            whole[:, -columns:] = -torch.inf
            targets %= whole.shape[1] - columns
        elif "NaN" in case:
            whole[2, 1] = torch.nan
    return {case: (whole.float() if "float32" in case else whole, targets) for case, (whole, targets) in cases.items()}


F_AND_G = Exercise(f_and_g, examine_f_and_g, also_named=("move",))
SLICED_CROSS_ENTROPY = Exercise(
    sliced_cross_entropy, examine_sliced_cross_entropy, also_named=("vocabulary_parallel_cross_entropy",)
)
EXERCISES = (F_AND_G, SLICED_CROSS_ENTROPY)
