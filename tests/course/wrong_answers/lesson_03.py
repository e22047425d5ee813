"""Wrong answers to the exercises of lesson 03."""

from tests.course.answers import WrongAnswer

WRONG_ANSWERS = {
    "average_gradients": (
        WrongAnswer(
            "the sum",
            fails="value",
            says="all ranks use everything: the gradient of 'body.weight' is",
            edits={"parameter.grad /= world_size": "pass"},
        ),
        WrongAnswer(
            "a rank without a gradient skips the call",
            fails="runs",
            says="the body is frozen, rank 0 leaves the head out: Rank 0 had returned. Rank",
            edits={"parameter.grad = torch.zeros_like(parameter)": "continue"},
        ),
        WrongAnswer(
            "layer by layer, so the tied weight twice",
            fails="cost",
            says="all ranks use everything: rank 0 calls all_reduce 8 times, budget 7.",
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
            fails="value",
            says="half precision, large gradients: the gradient of 'weight' is [inf, inf]",
            edits={
                "        parameter.grad /= world_size\n": "",
                "dist.all_reduce(parameter.grad)": (
                    "dist.all_reduce(parameter.grad)\n        parameter.grad /= world_size"
                ),
            },
        ),
        WrongAnswer(
            "frozen ones too",
            fails="untouched",
            says="the body is frozen, rank 0 leaves the head out: the gradient of 'body.weight' is [0, 0",
            edits={"if not parameter.requires_grad:\n            continue": "pass"},
        ),
    ),
    "average_unequal": (
        WrongAnswer(
            "the mean of the ranks' means",
            fails="value",
            says="rank r has 2r + 1 items: the gradient of",
            edits={"items / total.item()": "1 / dist.get_world_size()"},
        ),
        WrongAnswer(
            "divides by the number of ranks too",
            fails="value",
            says="4 items on each rank: the gradient of",
            edits={"items / total.item()": "items / total.item() / dist.get_world_size()"},
        ),
        WrongAnswer(
            "0 times NaN",
            fails="value",
            says="the gradient of 'body.weight' is wrong in 9 of 9 elements: element 0 is nan",
            edits={"items == 0": "parameter.grad is None"},
        ),
        WrongAnswer(
            "a rank without items returns",
            fails="runs",
            says="rank 0 has no items, its gradients are NaN: Rank 0 had returned. Rank",
            edits={"    for parameter in": "    if items == 0:\n        return\n    for parameter in"},
        ),
        WrongAnswer(
            "asks for the total once per parameter",
            fails="cost",
            says="4 items on each rank: rank 0 calls all_reduce 14 times, budget 8.",
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
