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
            says="where x + f(x) has the gradient y is [2, 4, 6], should be [11, 22, 33]",
            edits={_F_BACKWARD: "def backward(ctx, gradient):\n            return gradient"},
            also=("cost", "agreement"),
        ),
        WrongAnswer(
            "g adds up in both directions",
            fails="value",
            says="where x + g(x) has the gradient y is [11, 22, 33], should be [2, 4, 6]",
            edits={_G_BACKWARD: "            return add_up(gradient)\n"},
            also=("cost",),
        ),
        WrongAnswer(
            "g takes the mean",
            fails="value",
            says="what g returns is [2.5, 5, 7.5], should be [10, 20, 30]",
            edits={_G_FORWARD: _G_FORWARD + " / dist.get_world_size(group)"},
        ),
        WrongAnswer(
            "f takes the mean, as of data-parallel gradients",
            fails="value",
            says="where x + f(x) has the gradient y is [3.5, 7, 10.5], should be [11, 22, 33]",
            edits={_F_BACKWARD: _F_BACKWARD + " / dist.get_world_size(group)"},
        ),
        WrongAnswer(
            "f and g swapped",
            fails="value",
            says="what f returns is [10, 20, 30], should be [1, 2, 3]",
            edits={"return F.apply, G.apply": "return G.apply, F.apply"},
            also=("cost", "agreement"),
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
            says="what f returns is [10, 20, 30], should be [1, 2, 3]",
            edits={"return x.view_as(x)": "return add_up(x)"},
            also=("cost",),
        ),
        WrongAnswer(
            "gathers all tensors and adds them up",
            fails="cost",
            says="calls all_gather once, budget 0",
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
            says="where x + g(x) has the gradient y is [1, 2, 3], should be [2, 4, 6]",
            edits={"return F.apply, G.apply": "return F.apply, lambda y: add_up(y.detach())"},
            also=("cost",),
        ),
        WrongAnswer(
            "forgets the group",
            fails="group",
            says="in a group of ranks 1, 2 and 3",
            edits={"dist.all_reduce(total, group=group)": "dist.all_reduce(total)"},
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
            says="float32, drawn with seed",
            edits={_EXPS: "logits, largest = logits.double(), largest.double()\n    " + _EXPS},
            also=("cost",),
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
        ),
        WrongAnswer(
            "forgets the group",
            fails="group",
            says="in a group of ranks 1, 2 and 3",
            edits={_TERMS: "dist.all_reduce(terms)"},
        ),
    ),
}
