"""Wrong answers to the exercises of lesson 14."""

from tests.course.wrong_answer import WrongAnswer

_F_BACKWARD = "def backward(ctx, gradient):\n            return add_up(gradient)"
_G_FORWARD = "def forward(ctx, y):\n            return add_up(y)"
_G_BACKWARD = "            return gradient\n"
_MAX = "dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)"
_TERMS = "dist.all_reduce(terms, group=group)"
_EXPS = "exps = (logits - largest[:, None]).exp()"

WRONG_ANSWERS = {
    "f_and_g": (
        WrongAnswer(
            "no f: its gradients stay partial",
            fails="value",
            says="for a vector is [4, 8, 12], should be [40, 80, 120]",
            edits={_F_BACKWARD: "def backward(ctx, gradient):\n            return gradient"},
            also=("cost",),
        ),
        WrongAnswer(
            "g adds up in both directions",
            fails="value",
            says="for a vector is [40, 80, 120], should be [4, 8, 12]",
            edits={_G_BACKWARD: "            return add_up(gradient)\n"},
            also=("cost",),
        ),
        WrongAnswer(
            "g takes the mean",
            fails="value",
            says="[g(x), g(2 x)] for a vector at entry 0 is [2.5, 5, 7.5], should be [10, 20, 30]",
            edits={_G_FORWARD: _G_FORWARD + " / dist.get_world_size(group)"},
        ),
        WrongAnswer(
            "f takes the mean, as of data-parallel gradients",
            fails="value",
            says="for a vector is [10, 20, 30], should be [40, 80, 120]",
            edits={_F_BACKWARD: _F_BACKWARD + " / dist.get_world_size(group)"},
        ),
        WrongAnswer(
            "f and g swapped",
            fails="value",
            says="[f(x), f(2 x)] for a vector at entry 0 is [10, 20, 30], should be [1, 2, 3]",
            edits={"return F.apply, G.apply": "return G.apply, F.apply"},
            also=("cost",),
        ),
        WrongAnswer(
            "adds up the gradient in place, which x + f(x) uses twice",
            fails="untouched",
            says="has other values than before",
            edits={"tensor.clone(memory_format=torch.contiguous_format)": "tensor"},
            also=("value",),
        ),
        WrongAnswer(
            "f adds up in forward too",
            fails="value",
            says="[f(x), f(2 x)] for a vector at entry 0 is [10, 20, 30], should be [1, 2, 3]",
            edits={"return x.view_as(x)": "return add_up(x)"},
            also=("cost",),
        ),
        WrongAnswer(
            "gathers all tensors and adds them up",
            fails="cost",
            says="calls all_gather 20 times, budget 0",
            edits={
                "dist.all_reduce(total, group=group)": (
                    "parts = [torch.empty_like(total) for _ in range(dist.get_world_size(group))]\n"
                    "        dist.all_gather(parts, total, group=group)\n"
                    "        total = sum(parts)"
                )
            },
        ),
        WrongAnswer(
            "g is the plain all-reduce, through which no gradient passes",
            fails="value",
            says="for a vector is None, should be a Tensor",
            edits={"return F.apply, G.apply": "return F.apply, lambda y: add_up(y.detach())"},
            also=("cost",),
        ),
        WrongAnswer(
            "one buffer for all sums of a shape",
            fails="value",
            says="f is applied to twice, with gradients y and 3 y of the results, for a vector",
            edits={
                "    def add_up(tensor):": "    buffers = {}\n\n    def add_up(tensor):",
                "tensor.clone(memory_format=torch.contiguous_format)": (
                    "buffers.setdefault((tensor.shape, tensor.dtype), tensor.new_empty(tensor.shape)).copy_(tensor)"
                ),
            },
        ),
        WrongAnswer(
            "takes NaN and inf out of gradients",
            fails="value",
            says="for NaN, inf and 3e38",
            edits={_G_BACKWARD: "            return gradient.nan_to_num()\n"},
        ),
        WrongAnswer(
            "g adds up only where the tensor needs a gradient",
            fails="value",
            says="used 20 times where no rank's tensors need gradients: [g(x), g(2 x)] for a vector",
            edits={"return F.apply, G.apply": "return F.apply, lambda y: G.apply(y) if y.requires_grad else y"},
            also=("cost",),
        ),
        WrongAnswer(
            "sees a tensor as a vector, as it lies",
            fails="runs",
            says="view size is not compatible",
            edits={
                "tensor.clone(memory_format=torch.contiguous_format)": "tensor.view(-1).clone()",
                "return total": "return total.view(tensor.shape)",
            },
        ),
        WrongAnswer(
            "forgets the group",
            fails="group",
            says="in a group of ranks 1, 2 and 3",
            edits={"dist.all_reduce(total, group=group)": "dist.all_reduce(total)"},
        ),
        WrongAnswer(
            "adds large tensors up in pieces",
            fails="cost",
            says="calls all_reduce 22 times, budget 20.",
            edits={
                "dist.all_reduce(total, group=group)": (
                    "for part in total.view(-1).split(2**16) if total.numel() else [total]:\n"
                    "            dist.all_reduce(part, group=group)"
                ),
            },
        ),
    ),
    "sliced_cross_entropy": (
        WrongAnswer(
            "each rank subtracts its own largest logit",
            fails="value",
            says="the list of loss and gradient at entry 0 is",
            edits={_MAX: ""},
        ),
        WrongAnswer(
            "subtracts nothing",
            fails="value",
            says="the list of loss and gradient at entry 0 is inf, should be",
            edits={
                _EXPS: "exps = logits.exp()",
                "logits[mine, here[mine]] - largest[mine]": "logits[mine, here[mine]]",
            },
        ),
        WrongAnswer(
            "computes in float64 always",
            fails="value",
            says="float32, -inf for the last rank's columns, drawn with seed",
            edits={_EXPS: "logits, largest = logits.double(), largest.double()\n    " + _EXPS},
            also=("cost", "memory"),
        ),
        WrongAnswer(
            "gathers the logits",
            fails="cost",
            says="calls all_gather once, budget 0",
            body="""
                n = dist.get_world_size(group)
                parts = [torch.empty_like(logits) for _ in range(n)]
                dist.all_gather(parts, logits, group=group)
                whole = torch.cat(parts, dim=1)
                gradient = whole.softmax(dim=1)
                gradient[torch.arange(tokens), targets] -= 1
                loss = torch.nn.functional.cross_entropy(whole, targets)
                return [loss, gradient.chunk(n, dim=1)[dist.get_rank(group)] / tokens]
            """,
            also=("memory",),
        ),
        WrongAnswer(
            "looks for the target in its own columns as if they were the first",
            fails="value",
            says="the list of loss and gradient at entry 0 is",
            edits={"targets - columns * dist.get_rank(group)": "targets"},
        ),
        WrongAnswer(
            "a target on another rank counts as column 0",
            fails="value",
            says="the list of loss and gradient at entry 0 is",
            edits={
                "((here >= 0) & (here < columns)).nonzero().flatten()": "torch.arange(tokens)",
                "here = targets - columns * dist.get_rank(group)": (
                    "here = targets - columns * dist.get_rank(group)\n"
                    "    here = here.where((here >= 0) & (here < columns), 0)"
                ),
            },
        ),
        WrongAnswer(
            "a target in this rank's first column is looked for elsewhere",
            fails="value",
            says="the list of loss and gradient at entry 0 is",
            edits={"(here >= 0)": "(here > 0)"},
        ),
        WrongAnswer(
            "a target in the next rank's first column is looked for here",
            fails="runs",
            says="raised IndexError",
            edits={"(here < columns)": "(here <= columns)"},
        ),
        WrongAnswer(
            "the gradient of its own columns' softmax",
            fails="value",
            says="the list of loss and gradient at entry 1 is wrong in",
            edits={"exps.div_(terms[0, :, None])": "logits.softmax(dim=1)"},
        ),
        WrongAnswer(
            "the gradient of the sum, beside the mean loss",
            fails="value",
            says="at entry 1 is wrong in",
            edits={"gradient.div_(tokens)": "gradient"},
        ),
        WrongAnswer(
            "three all-reduces",
            fails="cost",
            says="calls all_reduce 3 times, budget 2",
            edits={_TERMS: "for term in terms:\n        dist.all_reduce(term, group=group)"},
        ),
        WrongAnswer(
            "adds up the softmax's numerators of the whole vocabulary",
            fails="cost",
            says="bytes from one rank, budget",
            edits={
                _TERMS: (
                    "everything = logits.new_zeros(2 * tokens + dist.get_world_size(group) * logits.numel())\n"
                    "    everything[: 2 * tokens] = terms.flatten()\n"
                    "    dist.all_reduce(everything, group=group)\n"
                    "    terms = everything[: 2 * tokens].view(2, tokens)"
                )
            },
            also=("memory",),
        ),
        WrongAnswer(
            "works in the caller's logits",
            fails="untouched",
            says="has other values than before",
            edits={_EXPS: "exps = logits.sub_(largest[:, None]).exp()", "- largest[mine]": ""},
            also=("value",),  # where all logits of one process are its own
        ),
        WrongAnswer(
            "0 times a logit of -inf",
            fails="value",
            says="float32, -inf for the last rank's columns",
            edits={
                "terms[1, mine] = logits[mine, here[mine]] - largest[mine]": (
                    "hit = torch.arange(columns, device=logits.device) == here[:, None]\n"
                    "    terms[1] = ((logits - largest[:, None]) * hit).sum(dim=1)"
                ),
            },
        ),
        WrongAnswer(
            "hides NaN",
            fails="value",
            says="NaN in one token, drawn with seed",
            edits={_EXPS: "logits = logits.nan_to_num()\n    " + _EXPS},
        ),
        WrongAnswer(
            "forgets the group",
            fails="group",
            says="in a group of ranks 1, 2 and 3",
            edits={_TERMS: "dist.all_reduce(terms)"},
        ),
        WrongAnswer(
            "adds many tokens up in pieces",
            fails="cost",
            says="70,001 tokens, one column a rank, drawn with seed 1: calls all_reduce 4 times, budget 2.",
            edits={
                "dist.all_reduce(terms, group=group)": (
                    "for part in terms.view(-1).split(2**16):\n        dist.all_reduce(part, group=group)"
                ),
            },
        ),
    ),
}
