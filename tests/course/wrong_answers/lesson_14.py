"""Wrong answers to the exercises of lesson 14."""

from tests.course.answers import WrongAnswer

WRONG_ANSWERS = {
    "f_and_g": (
        WrongAnswer(
            "f and g swapped",
            "value",
            "1], should be [1, 2, 3, 4, 5, 6]",
            {"return F.apply, G.apply": "return G.apply, F.apply"},
        ),
        WrongAnswer(
            "g adds up in both directions",
            "value",
            "a matrix: x's gradient through g is",
            {"            return gradient\n": "            return add_up(gradient)\n"},
        ),
        WrongAnswer(
            "g takes the mean",
            "value",
            "a matrix: g(x) is",
            {
                "def forward(ctx, y):\n            return add_up(y)": (
                    "def forward(ctx, y):\n            return add_up(y) / dist.get_world_size(group)"
                )
            },
        ),
        WrongAnswer(
            "g is the plain all-reduce, through which no gradient passes",
            "runs",
            "Rank 0 raised RuntimeError: element 0 of tensors does not require grad and does not",
            {"return F.apply, G.apply": "return F.apply, lambda y: add_up(y.detach())"},
        ),
        WrongAnswer(
            "no f: its gradients stay partial",
            "value",
            "a matrix: x's gradient through f is [1, 1, 1, 1, 1, 1], should be",
            {"gradient):\n            return add_up(gradient)": "gradient):\n            return gradient"},
        ),
        WrongAnswer(
            "sums the caller's tensor",
            "untouched",
            "a matrix: the gradient that f's backward was given is",
            {"total = tensor.clone(memory_format=torch.contiguous_format)": "total = tensor.detach()"},
        ),
    ),
    "slice_qkv": (
        WrongAnswer(
            "rows of the whole, whatever they belong to",
            "value",
            "4 heads of q, 4 of k and v, rank 1 of 2: the result is",
            body="return weight.chunk(n)[rank]",
        ),
        WrongAnswer(
            "three equal parts, though k and v have fewer heads",
            "value",
            "8 heads of q, 2 of k and v, rank 0 of 2: the result is",
            {"weight.split([heads * rows, kv_heads * rows, kv_heads * rows])": "weight.chunk(3)"},
        ),
        WrongAnswer(
            "all heads of k and v",
            "value",
            "4 heads of q, 4 of k and v, rank 1 of 2: the result has shape (20, 3), should have (12, 3)",
            {"part.chunk(n)[rank] for part in parts": "parts[0].chunk(n)[rank], *parts[1:]"},
        ),
        WrongAnswer(
            "every n-th row",
            "value",
            "4 heads of q, 4 of k and v, rank 1 of 2: the result is",
            {"part.chunk(n)[rank]": "part[rank::n]"},
        ),
    ),
    "sliced_cross_entropy": (
        WrongAnswer(
            "each rank subtracts its own largest logit",
            "value",
            "small logits: the loss is 2",
            {"dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)": ""},
        ),
        WrongAnswer(
            "subtracts nothing",
            "value",
            "logits of about 1,000: the loss is inf, should be",
            {
                "exps = (logits - largest[:, None]).exp()": "exps = logits.exp()",
                "logits[mine, here[mine]] - largest[mine]": "logits[mine, here[mine]]",
            },
        ),
        WrongAnswer(
            "looks for the target in its own columns as if they were the first",
            "value",
            "small logits: the loss is 2",
            {"targets - columns * dist.get_rank(group)": "targets"},
        ),
        WrongAnswer(
            "gathers the logits",
            "cost",
            "bytes from one rank, budget",
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
            "value",
            "small logits: the gradient",
            {"gradient.div_(tokens)": "gradient"},
        ),
        WrongAnswer(
            "works in the caller's logits",
            "untouched",
            "small logits: `logits`",
            {
                "exps = (logits - largest[:, None]).exp()": "exps = logits.sub_(largest[:, None]).exp()",
                "- largest[mine]": "",
            },
        ),
    ),
}
