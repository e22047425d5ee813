"""Wrong answers to the exercises of lesson 03."""

from tests.course.wrong_answer import WrongAnswer

WRONG_ANSWERS = {
    "average_gradients": (
        WrongAnswer(
            "the sum, never divided",
            fails="value",
            says="Rank 0, plain model: the gradient of '0' is [360, 720, 1080], should be [90, 180, 270].",
            edits={"        parameter.grad /= dist.get_world_size()  # before the sum": "        # the sum"},
        ),
        WrongAnswer(
            "divides after the sum, which half precision can't hold",
            fails="value",
            says="half precision: the gradient of '0' is [inf, inf], should be [40000, 40000].",
            edits={
                "        parameter.grad /= dist.get_world_size()  # before the sum": "        # the sum",
                "dist.all_reduce(parameter.grad)": "dist.all_reduce(parameter.grad)\n"
                "        parameter.grad /= dist.get_world_size()",
            },
        ),
        WrongAnswer(
            "a rank without a gradient does not take part",
            fails="runs",
            says="did not come back",
            edits={"parameter.grad = torch.zeros_like(parameter)": "continue"},
        ),
        WrongAnswer(
            "walks through the layers and meets a tied weight twice (a mean of means: only the cost tells)",
            fails="cost",
            says="4 ranks, tied weight: 72 bytes from one rank, budget 48; calls all_reduce 4 times, budget 3.",
            edits={
                "model.parameters()": "[p for part in model.modules() for p in part.parameters(recurse=False)]",
            },
        ),
        WrongAnswer(
            "gives frozen parameters gradients of zeros",
            fails="untouched",
            says="a frozen parameter: the gradient of '0' is changed, should be left alone.",
            edits={"if not parameter.requires_grad:": "if False:"},
            also=("cost",),
        ),
        WrongAnswer(
            "collects everybody's gradients as objects",
            fails="cost",
            says="calls all_gather",
            body="""
                for parameter in model.parameters():
                    if parameter.requires_grad:
                        everyones = [None] * dist.get_world_size()
                        dist.all_gather_object(everyones, parameter.grad)
                        present = [each.double() for each in everyones if each is not None]
                        parameter.grad = (sum(present) / len(everyones)).to(parameter.dtype)
            """,
        ),
        WrongAnswer(
            "divides by four, not by the number of ranks",
            fails="value",
            says="on 3 ranks, plain model",
            edits={"/= dist.get_world_size()": "/= 4"},
        ),
        WrongAnswer(
            "changes the weights, too",
            fails="untouched",
            says="has other values than before",
            edits={"dist.all_reduce(parameter.grad)": "dist.all_reduce(parameter.grad), parameter.data.mul_(1.0001)"},
        ),
        WrongAnswer(
            "averages an old gradient of a frozen parameter",
            fails="untouched",
            says="the gradient of '0' is changed",
            body="""
                for parameter in model.parameters():
                    if not parameter.requires_grad and parameter.grad is None:
                        continue
                    if parameter.grad is None:
                        parameter.grad = torch.zeros_like(parameter)
                    parameter.grad /= dist.get_world_size()
                    dist.all_reduce(parameter.grad)
            """,
            also=("cost",),
        ),
    ),
    "average_unequal": (
        WrongAnswer(
            "the mean of the ranks' means",
            fails="value",
            says="Rank 0, items [3, 4, 5, 6]: the gradient of '0' is [90, 180, 270], should be",
            edits={"items / total.item()": "1 / dist.get_world_size()"},
        ),
        WrongAnswer(
            "weighs by items, then divides by the number of ranks",
            fails="value",
            says="Rank 0, 2 items each: the gradient of '0' is [180, 360, 540], should be [90, 180, 270].",
            edits={"items / total.item()": "items / dist.get_world_size()"},
        ),
        WrongAnswer(
            "weighs NaN with nothing, which is NaN",
            fails="value",
            says="rank 0 has no items, its gradient is NaN: the gradient of '0' is [nan, nan, nan], should be",
            edits={"if items == 0:": "if parameter.grad is None:"},
        ),
        WrongAnswer(
            "a rank without items does not take part",
            fails="runs",
            says="did not come back",
            edits={"parameter.grad = torch.zeros_like(parameter)": "continue"},
        ),
        WrongAnswer(
            "asks for the number of items again for every parameter",
            fails="cost",
            says="calls all_reduce 4 times, budget 3",
            edits={
                "total = torch.tensor(items, device=next(model.parameters()).device)\n    dist.all_reduce(total)\n": "",
                "    for parameter in model.parameters():\n": "for parameter in model.parameters():\n"
                "        total = torch.tensor(items)\n        dist.all_reduce(total)\n",
            },
        ),
        WrongAnswer(
            "hides every NaN",
            fails="value",
            says="a real NaN in the last rank's gradient",
            edits={"dist.all_reduce(parameter.grad)": "dist.all_reduce(parameter.grad.nan_to_num_())"},
        ),
        WrongAnswer(
            "counts items in one byte",
            fails="value",
            says="200 items and more",
            edits={"torch.tensor(items, device": "torch.tensor(items, dtype=torch.uint8, device"},
        ),
    ),
}
