"""Wrong answers to the exercises of lesson 10."""

from tests.course.answers import WrongAnswer

WRONG_ANSWERS = {
    "sharded_step": (
        WrongAnswer(
            "keeps every weight from the forward for the backward",
            "memory",
            "4 elements beside its arguments, budget",
            {
                "kept = [inputs]": "kept, weights = [inputs], []",
                ("outputs = kept[-1] @ gather(shard).T  # the whole weight has no name, so the line's end frees it"): (
                    "weights.append(gather(shard))\n        outputs = kept[-1] @ weights[-1].T"
                ),
                "whole = gather(shard)\n        handed": "whole = weights.pop()\n        handed",
            },
        ),
        WrongAnswer(
            "the weight is still there when its gradient is made",
            "memory",
            "elements beside its arguments, budget",
            {
                ("whole = gather(shard)\n        handed_down = delta @ whole\n        del whole\n        gradient"): (
                    "whole = gather(shard)\n        handed_down = delta @ whole\n        gradient"
                ),
                "del gradient": "del gradient, whole",
            },
        ),
        WrongAnswer(
            "gathers everything at once, as if only the root were wrapped",
            "memory",
            "elements beside its arguments, budget",
            {
                "kept = [inputs]": "kept, weights = [inputs], [gather(shard) for shard in shards]",
                "for shard in shards:\n": "for weight in weights:\n",
                "outputs = kept[-1] @ gather(shard).T": "outputs = kept[-1] @ weight.T",
                "whole = gather(shard)\n        handed": "whole = weights.pop()\n        handed",
            },
        ),
        WrongAnswer(
            "forgets the relu on the way back",
            "value",
            "3 layers: `shards`[0] is wrong in",
            {"delta = handed_down * below.sign()": "delta = handed_down"},
        ),
        WrongAnswer(
            "all-reduces the whole gradient and takes its rows",
            "cost",
            "6 bytes from one rank, budget",
            {
                "dist.reduce_scatter(mine, list(gradient.split(len(shard))))": (
                    "dist.all_reduce(gradient)\n        mine.copy_(gradient.split(len(shard))[dist.get_rank()])"
                )
            },
        ),
        WrongAnswer(
            "steps with the gradient of its own items",
            "value",
            "1 layer: `shards`[0] is wrong in",
            {
                "dist.reduce_scatter(mine, list(gradient.split(len(shard))))": (
                    "mine.copy_(gradient.split(len(shard))[dist.get_rank()])"
                )
            },
        ),
        WrongAnswer(
            "the mean over this rank's items",
            "value",
            "1 layer: `shards`[0] is wrong in",
            {"delta = outputs - targets": "delta = (outputs - targets) / len(targets)"},
        ),
    ),
    "gather_uneven": (
        WrongAnswer(
            "leaves the padding in", "value", "rows: the result has shape", {"return whole[:rows]": "return whole"}
        ),
        WrongAnswer(
            "rounds down",
            "runs",
            "Rank 0 raised RuntimeError: The expanded size of the tensor (1) must match the",
            {"-(-rows // n)": "max(rows // n, 1)"},
        ),
        WrongAnswer(
            "pads at the front",
            "value",
            "rows: the result",
            {"padded[: len(shard)] = shard": "padded[k - len(shard) :] = shard"},
        ),
        WrongAnswer(
            "asks all ranks first how many rows they have",
            "cost",
            "rows: rank 0 calls all_gather twice, budget 1",
            {
                "n = dist.get_world_size()": (
                    "n = dist.get_world_size()\n"
                    "    lengths = [torch.zeros(1, dtype=torch.int64, "
                    "device=shard.device) for _ in range(n)]\n"
                    "    dist.all_gather(lengths, torch.tensor([len(shard)], "
                    "device=shard.device))"
                )
            },
        ),
        WrongAnswer(
            "sends shards of different sizes",
            "runs",
            "All ranks must make the same call, with tensors of the same shape and dtype",
            {
                "padded = shard.new_zeros(k, shard.shape[1])\n": "padded = shard\n",
                "    padded[: len(shard)] = shard\n": "",
            },
        ),
        WrongAnswer(
            "a rank without rows takes no part",
            "runs",
            "did not come back",
            {
                "    n = dist.get_world_size()\n": (
                    "    n = dist.get_world_size()\n    if len(shard) == 0:\n        return shard\n"
                )
            },
        ),
    ),
    "shard_unit": (
        WrongAnswer(
            "nobody frees after the forward",
            "memory",
            "elements: step 0: the parameters' memory in bytes after forward is",
            {"    module.register_forward_hook(lambda *_: free())\n": ""},
        ),
        WrongAnswer(
            "frees the parameters by giving them other memory, and autograd keeps the first",
            "memory",
            "elements: step 0: the parameters' memory in bytes after forward is",
            body="""
            part = -(-sum(sizes) // n)
            shapes = [parameter.shape for parameter in parameters]

            def flatten(tensors):
                flat = torch.cat([each.detach().flatten() for each in tensors])
                return nn.functional.pad(flat, (0, n * part - len(flat)))

            shard = nn.Parameter(flatten(parameters).view(n, part)[rank].clone())

            def gather():
                whole = shard.new_empty(n * part)
                dist.all_gather(list(whole.split(part)), shard.detach())
                for parameter, shape, values in zip(parameters, shapes, whole.split([*sizes, n * part - sum(sizes)])):
                    parameter.data = values.view(shape)

            def free():
                for parameter in parameters:
                    parameter.data = shard.new_empty(0)

            def reduce():
                gradients = flatten(parameter.grad for parameter in parameters) / n
                shard.grad = torch.empty_like(shard)
                dist.reduce_scatter(shard.grad, list(gradients.split(part)))
                for parameter in parameters:
                    parameter.grad = None
                free()

            free()
            module.register_forward_pre_hook(lambda *_: gather())
            module.register_forward_hook(lambda *_: free())
            module.register_full_backward_pre_hook(lambda *_: gather())
            module.register_full_backward_hook(lambda *_: reduce())
            return shard
            """,
        ),
        WrongAnswer(
            "never gathers for the backward",
            "runs",
            "Rank 0 raised RuntimeError: in backward 'up.weight' has no memory: gather the unit",
            {"    module.register_full_backward_pre_hook(lambda *_: gather())\n": ""},
        ),
        WrongAnswer(
            "never gathers for the forward",
            "runs",
            "Rank 0 raised RuntimeError: in forward 'up.weight' has no memory: gather the unit",
            {"    module.register_forward_pre_hook(lambda *_: gather())\n": ""},
        ),
        WrongAnswer(
            "does not free after the backward",
            "memory",
            "elements: step 0: the parameters' memory in bytes after backward is",
            {"    def reduce():\n        free()\n": "    def reduce():\n"},
        ),
        WrongAnswer(
            "the sum, not the mean",
            "value",
            "elements: step 0: shard.grad",
            {" for parameter in parameters) / n": " for parameter in parameters)"},
        ),
        WrongAnswer(
            "leaves the whole gradients on the parameters",
            "value",
            "elements: step 1: shard.grad",
            {"        for parameter in parameters:\n            parameter.grad = None\n": ""},
        ),
        WrongAnswer(
            "forgets that n need not divide the elements",
            "runs",
            "Rank 0 raised RuntimeError: split_with_sizes expects split_sizes have only",
            {"-(-sum(sizes) // n)": "sum(sizes) // n"},
        ),
        WrongAnswer(
            "the shard is a view, and is freed with the rest",
            "memory",
            "elements: the shard has no memory of its own: it was freed with the unit's",
            {"[rank].clone()": "[rank]"},
        ),
        WrongAnswer(
            "all-reduces the whole gradient and takes its part",
            "cost",
            "0 bytes from one rank, budget",
            {
                "dist.reduce_scatter(shard.grad, list(gradients.split(part)))": (
                    "dist.all_reduce(gradients)\n        shard.grad.copy_(gradients.view(n, part)[rank])"
                )
            },
        ),
    ),
}
