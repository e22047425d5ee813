"""Wrong answers to the exercises of lesson 03."""

from tests.course.wrong_answer import WrongAnswer

WRONG_ANSWERS = {
    "average_gradients": (
        WrongAnswer(
            "takes a gradient of nothing but NaN for none",
            fails="value",
            says="the loss of rank 0 is NaN: rank 0's gradient of '0' (float32), step 0, is ",
            edits={"parameter.grad is None": "parameter.grad is None or bool(parameter.grad.isnan().all())"},
        ),
        WrongAnswer(
            "takes parameters without memory for tied ones",
            fails="value",
            says="rank 0's gradient of '9'",
            body="""
            done = set()
            for parameter in model.parameters():
                if not parameter.requires_grad or parameter.data_ptr() in done:
                    continue
                done.add(parameter.data_ptr())
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                parameter.grad /= world_size
                dist.all_reduce(parameter.grad)
            """,
        ),
        WrongAnswer(
            "goes through the parameters by address",
            fails="value",
            says="parameters in another order in memory on odd ranks: the gradient of",
            edits={"model.parameters()": "sorted(model.parameters(), key=lambda each: (each.numel(), id(each)))"},
            also=("agreement",),
        ),
        WrongAnswer(
            "zeros by multiplication, which are NaN where a weight is inf",
            fails="value",
            says="the gradient of 'infinite' is [nan, nan, nan, ",
            edits={"torch.zeros_like(parameter)": "parameter.detach() * 0"},
        ),
        WrongAnswer(
            "the same zeros for two parameters",
            fails="value",
            says="neither this nor '0': the gradient of '1' is",
            edits={
                "    for parameter in": "    zeros = {}\n    for parameter in",
                "torch.zeros_like(parameter)": "zeros.setdefault((parameter.shape, parameter.dtype), "
                "torch.zeros_like(parameter))",
            },
            also=("agreement",),
        ),
        WrongAnswer(
            "reduces a copy where memory has another order",
            fails="value",
            says="tied weight: the gradient of '0.0.first.weight' is",
            edits={"dist.all_reduce(parameter.grad)": "dist.all_reduce(parameter.grad.contiguous())"},
            also=("agreement",),
        ),
        WrongAnswer(
            "skips numbers without dimensions",
            fails="value",
            says="the gradient of 'scalar' is",
            edits={"if not parameter.requires_grad:": "if not parameter.requires_grad or parameter.dim() == 0:"},
            also=("agreement",),
        ),
        WrongAnswer(
            "hides NaN and inf",
            fails="value",
            says="the gradient of 'infinite' is [0, 3.40282e+38, -3.40282e+38, ",
            edits={
                "dist.all_reduce(parameter.grad)": "dist.all_reduce(parameter.grad)\n"
                "        parameter.grad.nan_to_num_()"
            },
        ),
        WrongAnswer(
            "leaves gradients that require a gradient",
            fails="untouched",
            says="the gradient of '0': requires_grad is True, should be False",
            edits={
                "dist.all_reduce(parameter.grad)": "dist.all_reduce(parameter.grad), parameter.grad.requires_grad_()"
            },
        ),
        WrongAnswer(
            "puts a part in eval mode into training",
            fails="untouched",
            says=".training is True, should be False",
            edits={"    for parameter in": "    model.train()\n    for parameter in"},
        ),
        WrongAnswer(
            "the sum, never divided",
            fails="value",
            says="the gradient of '0' is [360, 720], should be [90, 180].",
            edits={"        parameter.grad /= world_size  # before the sum": "        # the sum"},
        ),
        WrongAnswer(
            "divides after the sum, which the dtype can't hold",
            fails="value",
            says="the gradient of 'large' is [inf, inf], should be [2.55212e+38, 2.55212e+38].",
            edits={
                "        parameter.grad /= world_size  # before the sum": "        # the sum",
                "dist.all_reduce(parameter.grad)": "dist.all_reduce(parameter.grad)\n"
                "        parameter.grad /= world_size",
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
            says="is changed, should be left alone.",
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
                        present = [each / len(everyones) for each in everyones if each is not None]
                        parameter.grad = sum(present, torch.zeros_like(parameter))
            """,
        ),
        WrongAnswer(
            "divides by four, not by the number of ranks",
            fails="value",
            says="model 0 drawn with seed",
            edits={"/= world_size": "/= 4"},
        ),
        WrongAnswer(
            "changes the weights, too",
            fails="untouched",
            says="has other values than before",
            edits={"dist.all_reduce(parameter.grad)": "dist.all_reduce(parameter.grad), parameter.data.mul_(1.0001)"},
        ),
        WrongAnswer(
            "leaves the trainable parameters on the model, a list that is wrong once a layer is frozen",
            fails="untouched",
            says="leaves the attribute '_trained' on the model",
            edits={
                "    for parameter in model.parameters():\n": "    model._trained = list(model.parameters())\n"
                "    for parameter in model._trained:\n"
            },
        ),
        WrongAnswer(
            "skips empty parameters, so a rank is left without a gradient",
            fails="value",
            says="the gradient of 'empty' is None, should be a Tensor",
            edits={"if not parameter.requires_grad:": "if not parameter.requires_grad or not parameter.numel():"},
            also=("agreement",),
        ),
        WrongAnswer(
            "skips long parameters",
            fails="value",
            says="the gradient of 'long' is",
            edits={"dist.all_reduce(parameter.grad)": "parameter.numel() > 100_000 or dist.all_reduce(parameter.grad)"},
            also=("agreement",),
        ),
        WrongAnswer(
            "keeps its zeros with the parameter, and the next step finds the mean there",
            fails="value",
            says="step 1, is",
            edits={
                "parameter.grad = torch.zeros_like(parameter)": "parameter.zeros = getattr("
                "parameter, 'zeros', torch.zeros_like(parameter))\n            parameter.grad = parameter.zeros"
            },
        ),
        WrongAnswer(
            "takes some parameter to be trainable",
            fails="runs",
            says="every parameter is frozen: Ranks 0, 1, 2 and 3 raised IndexError",
            edits={
                "    for parameter in": "    [each for each in model.parameters() if each.requires_grad][0]\n"
                "    for parameter in"
            },
        ),
        WrongAnswer(
            "averages an old gradient of a frozen parameter",
            fails="untouched",
            says="the gradient of 'frozen' is changed",
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
            "clears a copy of what is transposed",
            fails="value",
            says="rank 0 has no items, its gradient is NaN: a tied weight",
            edits={
                "parameter.grad = torch.zeros_like(parameter)": "if parameter.grad is None:\n"
                "                parameter.grad = torch.zeros_like(parameter)\n"
                "            parameter.grad.flatten().zero_()"
            },
        ),
        WrongAnswer(
            "a share in the gradient's dtype",
            fails="value",
            says="rank 0 has 1 of 3,000,001 items, and large gradients: rank 0's gradient of '0' (float16)",
            edits={"items / total.item()": "torch.tensor(items / total.item()).to(parameter)"},
        ),
        WrongAnswer(
            "takes a rank whose loss is NaN for one without items",
            fails="value",
            says="the loss of rank 0, which has items, is NaN: rank 0's gradient of '0' (float32), step 0, is",
            edits={
                "    for parameter in model.parameters():\n": (
                    "    without = all(each.grad is None or each.grad.isnan().all() for each in model.parameters())\n"
                    "    for parameter in model.parameters():\n"
                ),
                "if items == 0:": "if without:",
            },
        ),
        WrongAnswer(
            "takes a gradient that is NaN throughout for that of a rank without items",
            fails="value",
            says="should be [nan, nan]",
            edits={"if items == 0:": "if parameter.grad is None or parameter.grad.isnan().all():"},
        ),
        WrongAnswer(
            "multiplies first, which the dtype can't hold",
            fails="value",
            says="the gradient of 'large' is",
            edits={
                "parameter.grad *= items / total.item()": "parameter.grad *= items",
                "dist.all_reduce(parameter.grad)": "dist.all_reduce(parameter.grad)\n"
                "        parameter.grad /= total.item()",
            },
        ),
        WrongAnswer(
            "divides first, which is 0 in half precision",
            fails="value",
            says="(float16), step 0, is [0, 0], should be ",
            edits={
                "parameter.grad *= items / total.item()": "parameter.grad /= total.item()\n"
                "        parameter.grad *= items"
            },
        ),
        WrongAnswer(
            "divides by the number of ranks at least",
            fails="value",
            says="if there were 2 ranks, model 1 drawn with seed 1",
            edits={"total.item()": "max(total.item(), dist.get_world_size())"},
        ),
        WrongAnswer(
            "the mean of the ranks' means",
            fails="value",
            says="the gradient of '0.0.first.weight' is [87, 174, 261, 348], should be",
            edits={"items / total.item()": "1 / dist.get_world_size()"},
        ),
        WrongAnswer(
            "weighs by items, then divides by the number of ranks",
            fails="value",
            says="the gradient of '0.0.first.weight' is [459, 918, 1377, 1836], should be ",
            edits={"items / total.item()": "items / dist.get_world_size()"},
        ),
        WrongAnswer(
            "weighs NaN with nothing, which is NaN",
            fails="value",
            says="a tied weight: the gradient of '0.0.first.weight' is [nan, nan, nan, nan], should be",
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
            says="calls all_reduce 6 times, budget 4",
            edits={
                "total = torch.tensor(items, device=next(model.parameters()).device)\n    dist.all_reduce(total)\n": "",
                "    for parameter in model.parameters():\n": "for parameter in model.parameters():\n"
                "        total = torch.tensor(items)\n        dist.all_reduce(total)\n",
            },
        ),
        WrongAnswer(
            "hides every NaN",
            fails="value",
            says="the gradient of 'infinite' is ",
            edits={"dist.all_reduce(parameter.grad)": "dist.all_reduce(parameter.grad.nan_to_num_())"},
        ),
        WrongAnswer(
            "averages the beginning of a long parameter",
            fails="value",
            says="the gradient of 'long' is wrong in",
            edits={
                "dist.all_reduce(parameter.grad)": "dist.all_reduce(\n"
                "            parameter.grad[:100_000] if parameter.dim() == 1 else parameter.grad)"
            },
            also=("agreement",),
        ),
        WrongAnswer(
            "counts items in four bytes",
            fails="value",
            says="drawn with seed",
            edits={"total.item()": "total.int().item()"},
        ),
        WrongAnswer(
            "keeps the total with the first parameter",
            fails="value",
            says="drawn with seed",
            edits={"items / total.item()": "items / vars(next(model.parameters())).setdefault('total', total.item())"},
        ),
        WrongAnswer(
            "counts items in two bytes",
            fails="value",
            says="the others 30,000 and more: many kinds of tensors: the gradient of 'vector' is",
            edits={"total.item()": "total.short().item()"},
        ),
    ),
}
