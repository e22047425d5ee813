"""Wrong answers to the exercises of lesson 03."""

from tests.course.answers import WrongAnswer

WRONG_ANSWERS = {
    "average_gradients": (
        WrongAnswer(
            "the sum",
            "value",
            "all ranks use everything: the gradient of 'body.weight' is",
            {"parameter.grad /= world_size": "pass"},
        ),
        WrongAnswer(
            "a rank without a gradient skips the call",
            "runs",
            "the body is frozen, rank 0 leaves the head out: Rank 0 had returned. Rank",
            {"parameter.grad = torch.zeros_like(parameter)": "continue"},
        ),
        WrongAnswer(
            "layer by layer, so the tied weight twice",
            "cost",
            "all ranks use everything: rank 0 calls all_reduce 8 times, budget 7.",
            body="""
            for layer in model.children():
                for parameter in layer.parameters():
                    if parameter.requires_grad:
                        if parameter.grad is None:
                            parameter.grad = torch.zeros_like(parameter)
                        dist.all_reduce(parameter.grad)
                        parameter.grad /= world_size
            """,
        ),
        WrongAnswer(
            "divides after the sum",
            "value",
            "half precision, large gradients: the gradient of 'weight' is [inf, inf]",
            {
                "        parameter.grad /= world_size\n": "",
                "dist.all_reduce(parameter.grad)": (
                    "dist.all_reduce(parameter.grad)\n        parameter.grad /= world_size"
                ),
            },
        ),
        WrongAnswer(
            "frozen ones too",
            "untouched",
            "the body is frozen, rank 0 leaves the head out: the gradient of 'body.weight' is [0, 0",
            {"if not parameter.requires_grad:\n            continue": "pass"},
        ),
    ),
    "average_unequal": (
        WrongAnswer(
            "the mean of the ranks' means",
            "value",
            "rank r has 2r + 1 items: the gradient of",
            {"items / total.item()": "1 / dist.get_world_size()"},
        ),
        WrongAnswer(
            "divides by the number of ranks too",
            "value",
            "4 items on each rank: the gradient of",
            {"items / total.item()": "items / total.item() / dist.get_world_size()"},
        ),
        WrongAnswer(
            "0 times NaN",
            "value",
            "the gradient of 'body.weight' is wrong in 9 of 9 elements: element 0 is nan",
            {"items == 0": "parameter.grad is None"},
        ),
        WrongAnswer(
            "a rank without items returns",
            "runs",
            "rank 0 has no items, its gradients are NaN: Rank 0 had returned. Rank",
            {"    for parameter in": "    if items == 0:\n        return\n    for parameter in"},
        ),
        WrongAnswer(
            "asks for the total once per parameter",
            "cost",
            "4 items on each rank: rank 0 calls all_reduce 14 times, budget 8.",
            body="""
            for parameter in model.parameters():
                total = torch.tensor(items)
                dist.all_reduce(total)
                if items == 0:
                    parameter.grad = torch.zeros_like(parameter)
                parameter.grad *= items / total.item()
                dist.all_reduce(parameter.grad)
            """,
        ),
    ),
}
