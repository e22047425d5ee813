"""Wrong answers to the exercises of lesson 11."""

from tests.course.wrong_answer import WrongAnswer

WRONG_ANSWERS = {
    "sharded_optimizer": (
        WrongAnswer(
            "keeps own.step as it was in the first step",
            fails="value",
            says="step() calls own.step as it is now, wrapped anew before each step, once, should do so 3 times",
            edits={
                "        own.step()": "        update.append(own.step)\n        update[0]()",
                "    def step": "    update = []\n\n    def step",
            },
        ),
        WrongAnswer(
            "keeps own.step as it was",
            fails="value",
            says="step() calls own.step as it is now, wrapped anew before each step, in no step, should do so once",
            edits={"        own.step()": "        update()", "    def step": "    update = own.step\n\n    def step"},
        ),
        WrongAnswer(
            "sends the memory that parameters had when it was called",
            fails="value",
            says="3 steps: parameter ",
            edits={
                "    def step": "    tensors = [parameter.detach() for parameter in params]\n\n    def step",
                "in enumerate(params)": "in enumerate(tensors)",
            },
            also=("agreement",),
        ),
        WrongAnswer(
            "makes what was frozen trainable",
            fails="value",
            says="step() makes parameter 2 trainable, which was frozen",
            edits={
                "dist.broadcast(parameter.detach(), src=i % n)": "parameter.requires_grad_(False)\n"
                "            dist.broadcast(parameter, src=i % n)\n            parameter.requires_grad_(True)"
            },
        ),
        WrongAnswer(
            "does not count frozen parameters",
            fails="value",
            says="parameter",
            edits={"    own = make(": "    params = [each for each in params if each.requires_grad]\n    own = make("},
            also=("memory",),
        ),
        WrongAnswer(
            "a rank without gradients takes no part",
            fails="runs",
            says="did not come back",
            edits={
                "        own.step()\n": "        if all(each.grad is None for each in params[rank::n]):\n"
                "            return\n        own.step()\n"
            },
        ),
        WrongAnswer(
            "sends nothing where the gradient is zero, as if nothing had moved",
            fails="value",
            says="3 steps: parameter",
            edits={
                "            dist.broadcast(parameter.detach(), src=i % n)\n": (
                    "            if parameter.grad is not None and parameter.grad.any():\n"
                    "                dist.broadcast(parameter.detach(), src=i % n)\n"
                )
            },
            also=("agreement",),
        ),
        WrongAnswer(
            "step() clears the gradients",
            fails="value",
            says="step() has changed the gradients of parameters",
            edits={"        own.step()\n": "        own.step()\n        own.zero_grad()\n"},
        ),
        WrongAnswer(
            "an optimizer for all parameters: right, and nothing saved",
            fails="memory",
            says="the state of all optimizers made has 42 elements, budget 7",
            edits={"params[rank::n]": "params"},
        ),
        WrongAnswer(
            "clears the gradients of its own share only",
            fails="value",
            says="Rank 0, 1 step: after zero_grad() parameters [1, 2, 5, 6, 7, 9, 10, 11] still have a gradient.",
            edits={"for parameter in params:\n            parameter.grad = None": "own.zero_grad()"},
        ),
        WrongAnswer(
            "nobody hears of the updates",
            fails="value",
            says="1 step: parameter 1 is [",
            edits={"dist.broadcast(parameter.detach(), src=i % n)": "pass"},
            also=("agreement",),
        ),
        WrongAnswer(
            "takes everything from rank 0",
            fails="value",
            says="1 step: parameter 1 is [",
            edits={"src=i % n": "src=0"},
        ),
        WrongAnswer(
            "only the owner calls broadcast",
            fails="runs",
            says="calls broadcast of",
            edits={"dist.broadcast(parameter": "if i % n == rank: dist.broadcast(parameter"},
        ),
        WrongAnswer(
            "shares out blocks, and sends as if they were dealt in turns",
            fails="value",
            says="1 step: parameter",
            edits={"params[rank::n]": "params[rank * len(params) // n : (rank + 1) * len(params) // n]"},
            also=("memory",),
        ),
        WrongAnswer(
            "gathers everybody's copy of every parameter",
            fails="cost",
            says="calls all_gather",
            edits={
                "dist.broadcast(parameter.detach(), src=i % n)": "copies = [torch.empty_like(parameter) for _ in "
                "range(n)]\n            dist.all_gather(copies, parameter.detach())\n            "
                "parameter.data.copy_(copies[i % n])"
            },
        ),
        WrongAnswer(
            "a whole optimizer that does not see others' gradients: some have state at once",
            fails="memory",
            says="the state of all optimizers made has 42 elements, budget 7",
            body="""
                rank, n = dist.get_rank(), dist.get_world_size()
                own = make(list(params))

                def step():
                    kept = [p.grad for p in params]
                    for i, p in enumerate(params):
                        p.grad = p.grad if i % n == rank else None
                    try:
                        own.step()
                    finally:
                        for p, gradient in zip(params, kept):
                            p.grad = gradient
                    for i, p in enumerate(params):
                        dist.broadcast(p.detach(), src=i % n)

                def zero_grad():
                    for p in params:
                        p.grad = None

                return own, step, zero_grad
            """,
        ),
        WrongAnswer(
            "a whole optimizer does the work, the sharded one is shown",
            fails="memory",
            says="the state of all optimizers made has 49 elements, budget 7",
            edits={
                "        own.step()": "        full.step()",
                "    def step": "    full = make(params)\n\n    def step",
            },
            also=("value",),
        ),
        WrongAnswer(
            "freezes what others own",
            fails="untouched",
            says="requires_grad is False, should be True",
            edits={
                "    def step": "    for i, p in enumerate(params): p.requires_grad_(i % n == rank)\n\n    def step"
            },
        ),
        WrongAnswer(
            "broadcasts a contiguous copy: a transposed weight never arrives",
            fails="value",
            says="1 step: parameter 1 is",
            edits={"parameter.detach(), src": "parameter.detach().contiguous(), src"},
            also=("agreement",),
        ),
        WrongAnswer(
            "zeroes the gradients in place",
            fails="value",
            says="step() has changed the gradients of parameters",
            edits={"        own.step()\n": "        own.step()\n        own.zero_grad(set_to_none=False)\n"},
        ),
        WrongAnswer(
            "a whole optimizer, and others' state is thrown away after each step",
            fails="memory",
            says="the state of all optimizers made has 42 elements, budget 7",
            edits={
                "make(params[rank::n])": "make(list(params))",
                "        own.step()\n": "        own.step()\n        for i, p in enumerate(params):\n"
                "            if i % n != rank:\n                own.state.pop(p, None)\n",
            },
        ),
        WrongAnswer(
            "any error becomes a RuntimeError",
            fails="runs",
            says="should raise ArithmeticError: this optimizer always fails",
            edits={
                "        own.step()\n": "        try:\n            own.step()\n        except Exception as error:\n"
                "            raise RuntimeError(str(error)) from None\n",
            },
        ),
        WrongAnswer(
            "does nothing where all gradients are 0",
            fails="value",
            says="3 steps: parameter 0 is [",
            edits={
                "        own.step()\n": "        if not any(p.grad is not None and p.grad.any() for p in params):\n"
                "            return\n        own.step()\n"
            },
        ),
        WrongAnswer(
            "a step that has raised counts as still going on",
            fails="value",
            says="if there were 2 ranks, 2 steps of plain SGD, of which the first raises: ",
            edits={
                "    def step": "    busy = []\n\n    def step",
                "        own.step()\n": "        if busy:\n            return\n        busy.append(True)\n"
                "        own.step()\n",
                "src=i % n)\n": "src=i % n)\n        busy.clear()\n",
            },
        ),
        WrongAnswer(
            "an error is raised again in each later step",
            fails="runs",
            says="2 steps of plain SGD, of which the first raises",
            edits={
                "    def step": "    errors = []\n\n    def step",
                "        own.step()\n": "        try:\n            own.step()\n"
                "        except ArithmeticError as error:\n            errors.append(error)\n",
                "src=i % n)\n": "src=i % n)\n        if errors:\n            raise errors[0]\n",
            },
        ),
        WrongAnswer(
            "steps again while there is no state",
            fails="value",
            says="1 step of plain SGD, seed",
            edits={"        own.step()\n": "        own.step()\n        if not own.state:\n            own.step()\n"},
        ),
        WrongAnswer(
            "empties the caller's list",
            fails="untouched",
            says="1 step: argument 1 has other entries than before",
            edits={
                "    own = make": "    mine = list(params)\n    params.clear()\n    params = mine\n    own = make",
            },
        ),
        WrongAnswer(
            "sends a large parameter in pieces",
            fails="cost",
            says="one parameter large: calls broadcast 13 times, budget 9.",
            edits={
                "dist.broadcast(parameter.detach(), src=i % n)": (
                    "large = parameter.numel() > 2**16\n"
                    "            for part in parameter.detach().split(2**16) if large else [parameter.detach()]:\n"
                    "                dist.broadcast(part, src=i % n)"
                ),
            },
        ),
    ),
    "reduce_to_owners": (
        WrongAnswer(
            "divides by 1024 before the sum, whatever n is",
            fails="value",
            says="7 parameters with tiny gradients: the owner's gradient of parameter 2",
            edits={"/= n": "/= 1024", "if i % n != rank": "parameter.grad *= 1024 / n\n        if i % n != rank"},
        ),
        WrongAnswer(
            "finds the owner by shape and dtype",
            fails="value",
            says="8 parameters of one shape and dtype: the owner's gradient of parameter 0 is None",
            also=("memory",),
            edits={
                "    for i, parameter in enumerate(params):\n        parameter.grad /= n\n": (
                    "    owner = {(each.shape, each.dtype): i % n for i, each in enumerate(params)}\n"
                    "    for parameter in params:\n        i = owner[parameter.shape, parameter.dtype]\n"
                    "        parameter.grad /= n\n"
                )
            },
        ),
        WrongAnswer(
            "empties the caller's list",
            fails="untouched",
            says="params has other entries than before",
            edits={
                "    for i, parameter in enumerate(params):": (
                    "    mine = list(params)\n    params.clear()\n    for i, parameter in enumerate(mine):"
                ),
            },
        ),
        WrongAnswer(
            "divides after the sum in bfloat16",
            fails="value",
            says="parameter 2, which this rank owns: .grad is [inf], should be",
            edits={
                "parameter.grad /= n": "parameter.grad /= 1 if parameter.dtype == torch.bfloat16 else n",
                "dst=i % n)": "dst=i % n)\n        parameter.grad /= n if parameter.dtype == torch.bfloat16 else 1",
            },
        ),
        WrongAnswer(
            "divides after the sum, which overflows",
            fails="value",
            says=".grad is [inf, inf, inf], should be",
            edits={"        parameter.grad /= n\n": "", "dst=i % n)\n": "dst=i % n)\n        parameter.grad /= n\n"},
        ),
        WrongAnswer(
            "divides after the sum where the dtype is complex128",
            fails="value",
            says="if there were 2 ranks, 7 parameters with huge gradients: the owner's gradient of parameter 5",
            edits={
                "parameter.grad /= n\n": "late = parameter.grad.dtype == torch.complex128\n"
                "        parameter.grad /= 1 if late else n\n",
                "dst=i % n)\n": "dst=i % n)\n        parameter.grad /= n if late else 1\n",
            },
        ),
        WrongAnswer(
            "reads what reduce leaves behind on the others",
            fails="memory",
            says="gradients of others",
            edits={"if i % n != rank:\n            parameter.grad = None": "pass"},
        ),
        WrongAnswer(
            "an all-reduce, of which n - 1 throw the result away",
            fails="cost",
            says="calls all_reduce 5 times, budget 0",
            edits={"dist.reduce(parameter.grad, dst=i % n)": "dist.all_reduce(parameter.grad)"},
        ),
        WrongAnswer(
            "the sum, not the mean",
            fails="value",
            says="parameter 0, which this rank owns: .grad is [",
            edits={"        parameter.grad /= n\n": ""},
        ),
        WrongAnswer(
            "frees the others' gradients before they have been sent",
            fails="runs",
            says="raised AttributeError",
            body="""
                for i, parameter in enumerate(params):
                    if i % n != rank:
                        parameter.grad = None
                for i, parameter in enumerate(params):
                    dist.reduce(parameter.grad.div_(n), dst=i % n)
            """,
        ),
        WrongAnswer(
            "reduces everything to rank 0",
            fails="value",
            says="Rank 1: parameter 1, which this rank owns: .grad is [",
            edits={"dst=i % n": "dst=0"},
            also=("cost",),
        ),
        WrongAnswer(
            "every rank begins with its own parameters",
            fails="runs",
            says="calls reduce (SUM) of",
            edits={"in enumerate(params):": "in sorted(enumerate(params), key=lambda each: each[0] % n != rank):"},
        ),
        WrongAnswer(
            "needs as many parameters as ranks",
            fails="runs",
            says="raised IndexError: list index out of range",
            edits={"    for i, parameter in": "    params[rank]\n    for i, parameter in"},
        ),
        WrongAnswer(
            "divides by four, not by the number of ranks",
            fails="value",
            says="if there were",
            edits={"/= n": "/= 4"},
        ),
        WrongAnswer(
            "sends a large gradient in pieces",
            fails="cost",
            says="one of them large: calls reduce 3 times, budget 2.",
            edits={
                "dist.reduce(parameter.grad, dst=i % n)": (
                    "large = parameter.numel() > 2**16\n"
                    "        for part in parameter.grad.split(2**16) if large else [parameter.grad]:\n"
                    "            dist.reduce(part, dst=i % n)"
                ),
            },
        ),
    ),
    "bytes_held": (
        WrongAnswer(
            "takes the size of a number from the default dtype",
            fails="value",
            says="float64 is the default dtype: the result is 384, should be 192",
            edits={"return 4 *": "return torch.empty(()).element_size() *"},
        ),
        WrongAnswer(
            "divides in floating point",
            fails="value",
            says="should be",
            edits={"parameters // n": "int(parameters / n)"},
        ),
        WrongAnswer(
            "at least one parameter for each rank",
            fails="value",
            says="0 parameters, n=5: the result is",
            edits={"parameters // n": "max(parameters // n, 1)"},
        ),
        WrongAnswer(
            "ZeRO-1 shares out the gradients too",
            fails="value",
            says="ZeRO-1, 1,000,000 parameters, n=2: the result is 10000000, should be 12000000.",
            edits={"share if stage >= 2": "share if stage >= 1"},
        ),
        WrongAnswer(
            "one number of state per parameter",
            fails="value",
            says="DDP, 1,000,000 parameters, n=2: the result is 12000000, should be 16000000.",
            edits={"2 * (share": "(share"},
        ),
        WrongAnswer(
            "ZeRO-3 keeps the weights whole",
            fails="value",
            says="ZeRO-3, 1,000,000 parameters, n=2: the result is 10000000, should be 8000000.",
            edits={"weights = share if stage >= 3 else parameters": "weights = parameters"},
        ),
        WrongAnswer(
            "counts numbers, not bytes",
            fails="value",
            says="DDP, 1,000,000 parameters, n=2: the result is 4000000, should be 16000000.",
            edits={"return 4 * ": "return "},
        ),
    ),
}
