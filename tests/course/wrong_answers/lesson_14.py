"""Wrong answers to the exercises of lesson 14."""

from tests.course.answers import WrongAnswer

WRONG_ANSWERS = {
    "f_and_g": (
        WrongAnswer(
            "f and g swapped",
            fails="value",
            says="1], should be [1, 2, 3, 4, 5, 6]",
            edits={
                "return F.apply, G.apply": "return G.apply, F.apply",
            },
        ),
        WrongAnswer(
            "g adds up in both directions",
            fails="value",
            says="a matrix: x's gradient through g is",
            edits={
                "            return gradient\n": "            return add_up(gradient)\n",
            },
        ),
        WrongAnswer(
            "g takes the mean",
            fails="value",
            says="a matrix: g(x) is",
            edits={
                "def forward(ctx, y):\n            return add_up(y)": (
                    "def forward(ctx, y):\n            return add_up(y) / dist.get_world_size(group)"
                ),
            },
        ),
        WrongAnswer(
            "g is the plain all-reduce, through which no gradient passes",
            fails="runs",
            says="Rank 0 raised RuntimeError: element 0 of tensors does not require grad and does not",
            edits={
                "return F.apply, G.apply": "return F.apply, lambda y: add_up(y.detach())",
            },
        ),
        WrongAnswer(
            "no f: its gradients stay partial",
            fails="value",
            says="a matrix: x's gradient through f is [1, 1, 1, 1, 1, 1], should be",
            edits={
                (
                    "def backward(ctx, gradient):\n            return add_up(gradient)"
                ): "def backward(ctx, gradient):\n            return gradient",
            },
        ),
        WrongAnswer(
            "sums the caller's tensor",
            fails="untouched",
            says="a matrix: the gradient that f's backward was given is",
            edits={
                "total = tensor.clone(memory_format=torch.contiguous_format)": "total = tensor.detach()",
            },
        ),
    ),
    "slice_qkv": (
        WrongAnswer(
            "rows of the whole, whatever they belong to",
            fails="value",
            says="4 heads of q, 4 of k and v, rank 1 of 2: the result is",
            body="return weight.chunk(n)[rank]",
        ),
        WrongAnswer(
            "three equal parts, though k and v have fewer heads",
            fails="value",
            says="8 heads of q, 2 of k and v, rank 0 of 2: the result is",
            edits={"weight.split([heads * rows, kv_heads * rows, kv_heads * rows])": "weight.chunk(3)"},
        ),
        WrongAnswer(
            "all heads of k and v",
            fails="value",
            says="4 heads of q, 4 of k and v, rank 1 of 2: the result has shape (20, 3), should have (12, 3)",
            edits={
                "return torch.cat([part.chunk(n)[rank] for part in parts])": (
                    "return torch.cat([parts[0].chunk(n)[rank], *parts[1:]])"
                ),
            },
        ),
        WrongAnswer(
            "every n-th row",
            fails="value",
            says="4 heads of q, 4 of k and v, rank 1 of 2: the result is",
            edits={"part.chunk(n)[rank]": "part[rank::n]"},
        ),
    ),
    "sliced_cross_entropy": (
        WrongAnswer(
            "each rank subtracts its own largest logit",
            fails="value",
            says="small logits: the loss is 2",
            edits={
                "dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)": "",
            },
        ),
        WrongAnswer(
            "subtracts nothing",
            fails="value",
            says="logits of about 1,000: the loss is inf, should be",
            edits={
                "exps = (logits - largest[:, None]).exp()": "exps = logits.exp()",
                "logits[mine, here[mine]] - largest[mine]": "logits[mine, here[mine]]",
            },
        ),
        WrongAnswer(
            "looks for the target in its own columns as if they were the first",
            fails="value",
            says="small logits: the loss is 2",
            edits={
                "targets - columns * dist.get_rank(group)": "targets",
            },
        ),
        WrongAnswer(
            "gathers the logits",
            fails="cost",
            says="bytes from one rank, budget",
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
            n=(4,),
        ),
        WrongAnswer(
            "the gradient of the sum, beside the mean loss",
            fails="value",
            says="small logits: the gradient",
            edits={
                "gradient.div_(tokens)": "gradient",
            },
        ),
        WrongAnswer(
            "works in the caller's logits",
            fails="untouched",
            says="small logits: `logits`",
            edits={
                "exps = (logits - largest[:, None]).exp()": "exps = logits.sub_(largest[:, None]).exp()",
                "- largest[mine]": "",
            },
        ),
    ),
}
