"""Wrong answers to the exercises of lesson 10 fsdp."""

from tests.course.wrong_answer import WrongAnswer

_FRESH_EACH_TIME = """
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
"""

WRONG_ANSWERS = {
    "shard_unit": (
        WrongAnswer(
            "gathers once for each output",
            fails="cost",
            says="calls all_gather",
            edits={
                "module.register_forward_hook(lambda *_: free())": "module.register_forward_hook(after_forward)",
                "    module.register_full_backward_pre_hook(lambda *_: gather())\n": "",
                "    free()\n    module": "    def after_forward(module, args, output):\n        free()\n"
                "        for each in output if isinstance(output, tuple) else [output]:\n"
                "            if each.requires_grad:\n                each.register_hook(lambda gradient: gather())\n\n"
                "    free()\n    module",
            },
        ),
        WrongAnswer(
            "gathers when the first of several outputs gets its gradient",
            fails="runs",
            says="no memory in backward",
            edits={
                "module.register_forward_hook(lambda *_: free())": "module.register_forward_hook(after_forward)",
                "    module.register_full_backward_pre_hook(lambda *_: gather())\n": "",
                "    free()\n    module": "    def after_forward(module, args, output):\n        free()\n"
                "        first = output if isinstance(output, torch.Tensor) else output[0]\n"
                "        if first.requires_grad:\n            first.register_hook(lambda gradient: gather())\n\n"
                "    free()\n    module",
            },
        ),
        WrongAnswer(
            "frees with the last gradient of a parameter, before the backward of what comes first",
            fails="runs",
            says="finds no memory in backward",
            edits={
                "    module.register_full_backward_hook(lambda *_: reduce())\n": "    arrived = []\n\n"
                "    def count(_):\n        arrived.append(1)\n"
                "        if len(arrived) % len(parameters) == 0:\n            reduce()\n\n"
                "    for parameter in parameters:\n        parameter.register_post_accumulate_grad_hook(count)\n"
            },
        ),
        WrongAnswer(
            "expects the output to be a tensor",
            fails="runs",
            says="raised AttributeError: 'tuple' object has no attribute 'requires_grad'",
            edits={
                "module.register_forward_hook(lambda *_: free())": "module.register_forward_hook(after_forward)",
                "    module.register_full_backward_pre_hook(lambda *_: gather())\n": "",
                "    free()\n    module": "    def after_forward(module, args, output):\n        free()\n"
                "        if output.requires_grad:\n            output.register_hook(lambda gradient: gather())\n\n"
                "    free()\n    module",
            },
        ),
        WrongAnswer(
            "copies rank 0's weights first, though all ranks have them",
            fails="cost",
            says="unit 1: calls broadcast once, budget 0",
            edits={
                "    whole = flatten(parameters)\n": "    whole = flatten(parameters)\n    dist.broadcast(whole, 0)\n"
            },
        ),
        WrongAnswer(
            "shard.grad is a part of what was sent",
            fails="memory",
            says="step 0: after backward shard.grad of unit 1 is a part of 480 bytes, budget 192.",
            edits={
                "shard.grad = torch.empty_like(shard)": "room = torch.empty(part + len(gradients), dtype=shard.dtype)\n"
                "        shard.grad, gradients = room[:part], room[part:].copy_(gradients)"
            },
        ),
        WrongAnswer(
            "nobody frees after the forward",
            fails="memory",
            says="Rank 0, step 0: between forward and backward unit 1 takes 384 bytes, should be 0.",
            edits={"    module.register_forward_hook(lambda *_: free())\n": ""},
        ),
        WrongAnswer(
            "frees the parameters by giving them other memory, and autograd keeps the first",
            fails="memory",
            says="Rank 0, step 0: between forward and backward unit 1 takes",
            body=_FRESH_EACH_TIME,
        ),
        WrongAnswer(
            "frees, but gathers into other memory than autograd has saved",
            fails="runs",
            says="raised RuntimeError: unit 2 finds no memory in backward where its forward had it",
            body=_FRESH_EACH_TIME.replace(
                "parameter.data = shard.new_empty(0)", "parameter.untyped_storage().resize_(0)"
            ),
        ),
        WrongAnswer(
            "never gathers for the backward",
            fails="runs",
            says="raised RuntimeError: unit 2 finds no memory in backward",
            edits={"    module.register_full_backward_pre_hook(lambda *_: gather())\n": ""},
        ),
        WrongAnswer(
            "never gathers for the forward",
            fails="runs",
            says="raised RuntimeError: unit 1 finds no memory in forward",
            edits={"    module.register_forward_pre_hook(lambda *_: gather())\n": ""},
        ),
        WrongAnswer(
            "does not free after the backward",
            fails="memory",
            says="Rank 0, step 0: unit 2 is whole while unit 1 computes.",
            edits={"    def reduce():\n        free()\n": "    def reduce():\n"},
        ),
        WrongAnswer(
            "the sum, not the mean",
            fails="value",
            says="Rank 0, gradients of 0 and an old shard.grad: unit 1 in its forward is wrong in",
            edits={" for parameter in parameters) / n": " for parameter in parameters)"},
        ),
        WrongAnswer(
            "reduces with the first gradient that arrives, when the others are not there yet",
            fails="runs",
            says="raised AttributeError: 'NoneType' object has no attribute 'detach'",
            edits={
                "module.register_full_backward_hook(lambda *_: reduce())": (
                    "parameters[-1].register_post_accumulate_grad_hook(lambda _: reduce())"
                )
            },
        ),
        WrongAnswer(
            "leaves the whole gradients on the parameters",
            fails="memory",
            says="Rank 0, step 0: after backward the parameters of unit 1 have a .grad, should be None.",
            edits={"        for parameter in parameters:\n            parameter.grad = None\n": ""},
            also=("value",),
        ),
        WrongAnswer(
            "forgets that n need not divide the elements",
            fails="runs",
            says="unit 1: Ranks 0, 1, 2 and 3 raised RuntimeError",
            edits={"-(-sum(sizes) // n)": "sum(sizes) // n"},
        ),
        WrongAnswer(
            "the shard is a view, and is freed with the rest",
            fails="runs",
            says="raised RuntimeError: the shard has no memory: it is a view of what was freed",
            edits={"[rank].clone()": "[rank]"},
        ),
        WrongAnswer(
            "every rank trains all of the unit",
            fails="memory",
            says="Rank 0, unit 1: the shard has 48 elements, budget 12.",
            edits={
                "whole.view(n, part)[rank].clone()": "whole.clone()",
                "shard.detach())": "shard.detach()[rank * part : (rank + 1) * part].clone())",
                "dist.reduce_scatter(shard.grad, list(gradients.split(part)))": (
                    "shard.grad.copy_(gradients)\n        dist.all_reduce(shard.grad)"
                ),
            },
            also=("cost",),
        ),
        WrongAnswer(
            "all-reduces the whole gradient and takes its part",
            fails="cost",
            says="calls all_reduce twice, budget 0; reduce_scatter is never called, should be twice.",
            edits={
                "dist.reduce_scatter(shard.grad, list(gradients.split(part)))": (
                    "dist.all_reduce(gradients)\n        shard.grad.copy_(gradients.view(n, part)[rank])"
                )
            },
        ),
        WrongAnswer(
            "frees after the forward in train mode only",
            fails="memory",
            says="NaN in the inputs: between forward and backward unit 4 takes 80 bytes, should be 0.",
            edits={
                "module.register_forward_hook(lambda *_: free())": (
                    "module.register_forward_hook(\n        lambda *_: free() if module.training or"
                    " not torch.is_grad_enabled() else None\n    )"
                )
            },
        ),
        WrongAnswer(
            "keeps the whole gradient in a bytearray",
            fails="memory",
            says="step 0: takes 84 elements out of torch by torch.frombuffer()",
            edits={
                "    def reduce():": "    room = bytearray(whole.nbytes)\n\n    def reduce():",
                "        gradients = flatten(parameter.grad for parameter in parameters) / n\n": (
                    "        gradients = torch.frombuffer(room, dtype=shard.dtype)\n"
                    "        gradients.copy_(flatten(parameter.grad for parameter in parameters) / n)\n"
                ),
            },
        ),
        WrongAnswer(
            "is not gathered for a step in eval mode",
            fails="value",
            says="small units, in eval() after huge gradients, NaN in the inputs: unit 4 in its forward is wrong in",
            edits={
                "module.register_forward_pre_hook(lambda *_: gather())": (
                    "module.register_forward_pre_hook(lambda *_: gather() if module.training or shard.grad is None\n"
                    "        or not torch.is_grad_enabled()\n"
                    "        else (whole.untyped_storage().resize_(whole.nbytes), whole.zero_(), None)[2])"
                )
            },
            also=("cost",),
        ),
        WrongAnswer(
            "divides late in float32",
            fails="value",
            says="in eval() after huge gradients, NaN in the inputs: unit 4 in its forward is wrong in",
            edits={
                " for parameter in parameters) / n": " for parameter in parameters)\n"
                "        late = gradients.dtype == torch.float32\n        gradients /= 1 if late else n",
                "list(gradients.split(part)))": "list(gradients.split(part)))\n        shard.grad /= n if late else 1",
            },
        ),
        WrongAnswer(
            "divides late in float64",
            fails="value",
            says="after huge gradients, eval() and no_grad(), other weights loaded: unit 1 in its forward is",
            edits={
                " for parameter in parameters) / n": " for parameter in parameters)\n"
                "        late = gradients.dtype == torch.float64\n        gradients /= 1 if late else n",
                "list(gradients.split(part)))": "list(gradients.split(part)))\n        shard.grad /= n if late else 1",
            },
        ),
        WrongAnswer(
            "multiplies the old shard.grad by 0",
            fails="value",
            says="in eval() after huge gradients, NaN in the inputs: unit 4 in its forward is wrong in",
            edits={
                "        shard.grad = torch.empty_like(shard)\n        dist.reduce_scatter(shard.grad, ": (
                    "        new = torch.empty_like(shard.detach())\n        dist.reduce_scatter(new, "
                ),
                "list(gradients.split(part)))": (
                    "list(gradients.split(part)))\n"
                    "        shard.grad = new if shard.grad is None else 0 * shard.grad + new"
                ),
            },
        ),
        WrongAnswer(
            "keeps the parameters that it was given",
            fails="memory",
            says="unit 1: after the call 384 bytes are kept beside the shards and their gradients, should be 0.",
            edits={
                "    whole = flatten(parameters)\n": "    first = flatten(parameters)\n    whole = first.clone()\n",
                "    def free():\n": "    def free():\n        assert len(first) == len(whole)\n",
            },
        ),
        WrongAnswer(
            "keeps the gradients as Python's numbers",
            fails="memory",
            says="elements out of torch by .item()",
            edits={
                "        for parameter in parameters:\n            parameter.grad = None": (
                    "        for parameter in parameters:\n"
                    "            [each.item() for each in parameter.grad.flatten()]\n            parameter.grad = None"
                )
            },
        ),
        WrongAnswer(
            "keeps the gradients as a list, in a hook of backward",
            fails="memory",
            says="step 0: takes 84 elements out of torch by .tolist()",
            edits={
                "    def free():\n": "    log = []\n\n    def free():\n",
                " / n\n": " / n\n        log[:] = gradients.tolist()\n",
            },
        ),
        WrongAnswer(
            "adds to the shard's gradient of before",
            fails="value",
            says="huge gradients, after gradients of 0 and an old shard.grad: unit 1",
            edits={
                "shard.grad = torch.empty_like(shard)": "new = torch.empty_like(shard)",
                "dist.reduce_scatter(shard.grad, list(gradients.split(part)))": (
                    "dist.reduce_scatter(new, list(gradients.split(part)))\n"
                    "        shard.grad = new + (0 if shard.grad is None else shard.grad)"
                ),
            },
        ),
        WrongAnswer(
            "frees after backward only where there is a gradient",
            fails="memory",
            says="gradients of 0 and an old shard.grad: unit 2 is whole while unit 1 computes",
            edits={
                "    def reduce():\n        free()\n": (
                    "    def reduce():\n        if any(each.grad.any() for each in parameters):\n            free()\n"
                )
            },
        ),
        WrongAnswer(
            "looks at what it has freed",
            fails="runs",
            says="raised RuntimeError: sum is called on a tensor whose memory has been freed (in line",
            edits={"resize_(0)\n": "resize_(0)\n        print(whole.sum())\n"},
        ),
        WrongAnswer(
            "leaves units smaller than the number of ranks as they are",
            fails="memory",
            says="unit 5: after the call unit 5 takes 2 bytes, should be 0.",
            edits={
                "    part = -(-sum(sizes) // n)\n": "    if sum(sizes) < n:\n"
                "        return nn.Parameter(parameters[0].detach().flatten())\n    part = -(-sum(sizes) // n)\n"
            },
            also=("cost", "value"),
        ),
        WrongAnswer(
            "gathers a large unit in pieces",
            fails="cost",
            says="a large unit, huge gradients: calls all_gather 4 times, budget 2.",
            edits={
                "dist.all_gather(list(whole.split(part)), shard.detach())": (
                    "pieces = [each.split(2**16) for each in (shard.detach(), *whole.split(part))]\n"
                    "        for own, *everyones in zip(*pieces):\n"
                    "            dist.all_gather(everyones, own)"
                ),
            },
        ),
    ),
}
