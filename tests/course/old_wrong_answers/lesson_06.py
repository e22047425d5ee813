"""Wrong answers to the exercises of lesson 06."""

from tests.course.wrong_answer import WrongAnswer

_SWITCH_BACK = "model.do_sync = before"

WRONG_ANSWERS = {
    "no_sync": (
        WrongAnswer(
            "does nothing where there is only one rank",
            fails="value",
            says="if there were one rank only, a block: do_sync in the block is True, should be False",
            edits={
                "model.disable_grad_sync()": "if __import__('torch').distributed.get_world_size() > 1:\n"
                "            model.disable_grad_sync()"
            },
        ),
        WrongAnswer(
            "clears the gradients when a block begins",
            fails="restored",
            says="the gradients that the model had before the block are no longer there",
            edits={
                "model.disable_grad_sync()\n": "model.disable_grad_sync()\n        model.zero_grad(set_to_none=False)\n"
            },
        ),
        WrongAnswer(
            "never switches back",
            fails="restored",
            says="Rank 0, a micro-batch: do_sync after the block is False, should be True.",
            body="model.disable_grad_sync()\nyield",
        ),
        WrongAnswer(
            "does not expect an exception",
            fails="restored",
            says="Rank 0, an exception in the block: do_sync after SomeError in the block is False, should be True.",
            body="before = model.do_sync\nmodel.disable_grad_sync()\nyield\nmodel.do_sync = before",
        ),
        WrongAnswer(
            "switches on, whatever was before",
            fails="restored",
            says="a micro-batch, switched off before: do_sync after the block is True, should be False.",
            edits={_SWITCH_BACK: "model.enable_grad_sync()"},
        ),
        WrongAnswer(
            "keeps the exception to itself",
            fails="value",
            says="Rank 0, an exception in the block: returned, should raise SomeError.",
            edits={"finally:\n": "except ZeroDivisionError:\n            pass\n        finally:\n"},
        ),
        WrongAnswer(
            "switches off after the caller's lines",
            fails="value",
            says="Rank 0, a micro-batch: do_sync in the block is [True], should be [False].",
            edits={"        model.disable_grad_sync()\n": "", "yield": "yield\n            model.disable_grad_sync()"},
            also=("cost", "restored"),
        ),
        WrongAnswer(
            "no yield",
            fails="runs",
            says="a micro-batch: Ranks 0, 1, 2 and 3 raised TypeError",
            body="model.disable_grad_sync()",
        ),
        WrongAnswer(
            "restores after an Exception only, not after Stop",
            fails="restored",
            says="an exception in the block: do_sync after Stop in the block is False",
            body="""
                before = model.do_sync
                model.disable_grad_sync()
                try:
                    yield
                except Exception:
                    if before: model.enable_grad_sync()
                    raise
                if before: model.enable_grad_sync()
            """,
        ),
        WrongAnswer(
            "leaves another sync_gradients behind",
            fails="untouched",
            says="leaves the attribute",
            edits={"model.do_sync = before": "model.do_sync = before\n            model.sync_gradients = lambda: None"},
            also=("cost",),
        ),
        WrongAnswer(
            "leaves the flag of all models of the class switched off",
            fails="untouched",
            says="leaves the attribute 'do_sync' on the class CountedModel",
            edits={"model.disable_grad_sync()": "type(model).do_sync = False\n        model.disable_grad_sync()"},
        ),
        WrongAnswer(
            "puts back everything that the model had",
            fails="restored",
            says="what the caller changes in the block, after it: the model: .training is True, should be False",
            edits={
                "before = model.do_sync": "before = dict(vars(model))",
                _SWITCH_BACK: "vars(model).update(before)",
            },
        ),
        WrongAnswer(
            "switches parts of the model that are wrapped as well",
            fails="value",
            says="in the block, the do_sync of another model, a part of this one is [False], should be [True].",
            edits={
                "model.disable_grad_sync()": "flagged = [m for m in model.modules() if hasattr(m, 'do_sync')]\n"
                "        for each in flagged:\n            each.disable_grad_sync()",
                _SWITCH_BACK: "for each in flagged:\n                each.do_sync = before",
            },
            also=("restored",),
        ),
        WrongAnswer(
            "averages after the block, where every parameter has a gradient",
            fails="cost",
            says="calls all_reduce 3 times, budget 0.",
            edits={
                _SWITCH_BACK: "model.do_sync = before\n"
                "            if all(p.grad is not None for p in model.parameters()):\n"
                "                model.sync_gradients()"
            },
        ),
        WrongAnswer(
            "sends after an exception",
            fails="cost",
            says="4 ranks: calls barrier ",
            edits={
                "finally:\n": "except BaseException:\n            dist.barrier()\n            raise\n        finally:\n"
            },
        ),
        WrongAnswer(
            "switches on again what was off before",
            fails="restored",
            says="switched off before, switched on in the block: do_sync after the block is True, should be False.",
            edits={_SWITCH_BACK: "if before:\n                model.enable_grad_sync()"},
        ),
        WrongAnswer(
            "counts the blocks of a model: only the outermost one restores",
            fails="restored",
            says="do_sync after the first and the second inner block, and after the outer one is [False, False, True]",
            body="""
                outermost = not hasattr(model, "before")
                if outermost:
                    model.before = model.do_sync
                model.disable_grad_sync()
                try:
                    yield
                finally:
                    if outermost:
                        model.do_sync = model.before
                        del model.before
            """,
        ),
        WrongAnswer(
            "keeps an exception of one class to itself",
            fails="value",
            says="an exception in the block: returned, should raise StopAsyncIteration.",
            edits={"finally:\n": "except StopAsyncIteration:\n            pass\n        finally:\n"},
        ),
        WrongAnswer(
            "puts the parameters back",
            fails="restored",
            says="what the caller changes in the block, after it: 'module.0.module.weight' has other values",
            edits={
                "before = model.do_sync": "before = model.do_sync\n"
                "        values = [each.detach().clone() for each in model.parameters()]",
                _SWITCH_BACK: "model.do_sync = before\n            with torch.no_grad():\n"
                "                for each, value in zip(model.parameters(), values):\n"
                "                    each.copy_(value)",
            },
        ),
        WrongAnswer(
            "switches on after an exception",
            fails="restored",
            says="in the block, switched off before: do_sync after SomeError in the block is True, should be False.",
            edits={
                "finally:\n": "except BaseException:\n            model.do_sync = True\n            raise\n"
                "        else:\n"
            },
        ),
    ),
    "train_epoch": (
        WrongAnswer(
            "clears the first of the optimizer's groups only",
            fails="value",
            says="8 micro-batches, n=4: the parameter '2.bias' is",
            edits={
                "            optimizer.zero_grad()": "            (parameter,) = optimizer.param_groups[0]['params']\n"
                "            parameter.grad = None"
            },
        ),
        WrongAnswer(
            "goes on without a micro-batch that does not fit into memory",
            fails="value",
            says="after SomeError in the sixth forward: returned, should raise SomeError",
            body="""
            for i, (inputs, targets) in enumerate(batches):
                last = (i + 1) % n == 0 or i + 1 == len(batches)
                window = min(n, len(batches) - i // n * n)
                with contextlib.nullcontext() if last else model.no_sync():
                    try:
                        loss = mse_loss(model(inputs), targets) / window
                        loss.backward()
                    except RuntimeError as error:
                        if "memory" not in str(error):
                            raise
                    model.sync_gradients()
                if last:
                    optimizer.step()
                    optimizer.zero_grad()
            """,
            also=("passes",),
        ),
        WrongAnswer(
            "runs each forward twice",
            fails="passes",
            says="16 forward passes for 8 micro-batches, should be one each",
            edits={
                "model(inputs)": "__import__('torch').utils.checkpoint.checkpoint(model, inputs, use_reentrant=False)"
            },
        ),
        WrongAnswer(
            "no step where the loss is NaN: the ranks part",
            fails="value",
            says="a target of each is NaN on rank 0: the parameter",
            edits={"        if last:\n": "        if last and not loss.isnan():\n"},
            also=("passes", "agreement"),
        ),
        WrongAnswer(
            "the remainder waits for the next epoch",
            fails="value",
            says="Rank 0, 6 micro-batches, n=4: the parameter '0.module.weight' is",
            edits={" or i + 1 == len(batches)": ""},
            also=("passes",),
        ),
        WrongAnswer(
            "knows the last micro-batch by its tensors, which came before, too",
            fails="value",
            also=("passes", "cost"),
            says="8 micro-batches, n=4: the parameter '0.module.weight' is wrong",
            edits={"i + 1 == len(batches)": "inputs is batches[-1][0]"},
        ),
        WrongAnswer(
            "squeezes the output, so that one column meets the targets' rows in all pairs",
            fails="value",
            says="n=4, one column: the parameter",
            edits={"model(inputs)": "model(inputs).squeeze(-1)"},
        ),
        WrongAnswer(
            "divides by n in the shorter window too",
            fails="value",
            says="Rank 0, 6 micro-batches, n=4: the parameter '0.module.weight' is",
            edits={"/ window": "/ n"},
        ),
        WrongAnswer(
            "does not divide",
            fails="value",
            says="Rank 0, 8 micro-batches, n=4: the parameter '0.module.weight' is",
            edits={" / window": ""},
        ),
        WrongAnswer(
            "off by one: the first window has one micro-batch",
            fails="value",
            says="Rank 0, 8 micro-batches, n=4: the parameter '0.module.weight' is",
            edits={"(i + 1) % n": "i % n"},
            also=("cost", "passes"),
        ),
        WrongAnswer(
            "never leaves no_sync",
            fails="value",
            says="Rank 0, 8 micro-batches, n=4: the parameter '0.module.weight' is",
            edits={"contextlib.nullcontext() if last else model.no_sync()": "model.no_sync()"},
            also=("agreement", "passes"),
        ),
        WrongAnswer(
            "talks after each micro-batch: right, and n times as much",
            fails="cost",
            says="4 ranks, 8 micro-batches, n=4: calls all_reduce 16 times, budget 4.",
            edits={"contextlib.nullcontext() if last else model.no_sync()": "contextlib.nullcontext()"},
            also=("passes",),
        ),
        WrongAnswer(
            "syncs at one micro-batch, steps at another",
            fails="value",
            says="Rank 0, 8 micro-batches, n=4: the parameter '0.module.weight' is",
            edits={"if last else model": "if i % n == 0 else model"},
            also=("agreement",),
        ),
        WrongAnswer(
            "one backward for the whole window",
            fails="passes",
            says="a forward pass begins before the backward pass of the one before",
            body="""
                for i in range(0, len(batches), n):
                    w = batches[i:i+n]
                    loss = sum(mse_loss(model(a), b) for a, b in w) / len(w)
                    loss.backward(); model.sync_gradients()
                    optimizer.step(); optimizer.zero_grad()
            """,
            also=("memory",),
        ),
        WrongAnswer(
            "one forward for the whole window",
            fails="passes",
            says="2 forward passes for 8 micro-batches",
            body="""
                for i in range(0, len(batches), n):
                    w = batches[i:i+n]
                    loss = mse_loss(model(torch.cat([a for a, b in w])), torch.cat([b for a, b in w]))
                    loss.backward(); model.sync_gradients()
                    optimizer.step(); optimizer.zero_grad()
            """,
        ),
        WrongAnswer(
            "keeps outputs",
            fails="memory",
            says="8 micro-batches, n=4: a forward pass begins while outputs or activations of earlier",
            edits={
                "mse_loss(model(inputs), targets)": "mse_loss(kept.append(model(inputs)) or kept[-1], targets)",
                "    for i,": "    kept = []\n    for i,",
            },
        ),
        WrongAnswer(
            "a step for the half window after Stop",
            fails="passes",
            says="after Stop in the sixth forward: optimizer.step() is called twice, should be once.",
            edits={
                "loss = mse_loss(model(inputs), targets) / window": "try:\n"
                "                loss = mse_loss(model(inputs), targets) / window\n"
                "            except KeyboardInterrupt:\n                optimizer.step()\n                raise"
            },
        ),
        WrongAnswer(
            "sets the flag by hand, with no thought of an exception",
            fails="restored",
            says="after SomeError in the sixth forward: do_sync is False, should be True.",
            edits={
                "with contextlib.nullcontext() if last else model.no_sync():": "model.do_sync = last\n        if True:"
            },
        ),
        WrongAnswer(
            "tries a micro-batch that failed once more",
            fails="value",
            says="n=4, after SomeError in the sixth forward: returned, should raise SomeError.",
            edits={
                "loss = mse_loss(model(inputs), targets) / window": "try:\n"
                "                loss = mse_loss(model(inputs), targets) / window\n"
                "            except Exception:\n                loss = mse_loss(model(inputs), targets) / window"
            },
            also=("passes",),
        ),
        WrongAnswer(
            "goes on where backward fails",
            fails="value",
            says="in the sixth backward: returned, should raise ",
            edits={
                "            loss.backward()": "            with contextlib.suppress(Exception):\n"
                "                loss.backward()"
            },
            also=("passes",),
        ),
        WrongAnswer(
            "goes on where the sync fails",
            fails="value",
            says="in the second sync: returned, should raise",
            edits={
                "            model.sync_gradients()": "            with contextlib.suppress(Exception):\n"
                "                model.sync_gradients()"
            },
            also=("passes", "runs"),
        ),
        WrongAnswer(
            "switches off around the step, with no thought of an exception",
            fails="restored",
            says="in the second optimizer.step(): do_sync is False, should be True.",
            edits={
                "optimizer.step()": "model.disable_grad_sync()\n            optimizer.step()\n"
                "            model.enable_grad_sync()"
            },
        ),
        WrongAnswer(
            "takes long windows at once",
            fails="passes",
            says="2 forward passes for ",
            edits={
                "    for i,": "    if n > 16:\n        rest = [batches[i : i + n] for i in range(0, len(batches), n)]\n"
                "        batches = [tuple(map(torch.cat, zip(*window))) for window in rest]\n        n = 1\n    for i,"
            },
        ),
        WrongAnswer(
            "averages itself",
            fails="passes",
            says="sync_gradients(), with do_sync True, is never called, should be twice.",
            edits={
                "model.sync_gradients()": "pass",
                "            optimizer.step()": "            for parameter in model.trained():\n"
                "                dist.all_reduce(parameter.grad)\n"
                "                parameter.grad /= dist.get_world_size()\n            optimizer.step()",
            },
        ),
        WrongAnswer(
            "hides NaN",
            fails="value",
            says="a target of each is NaN on rank 0: the parameter",
            edits={
                "            optimizer.step()": "            for parameter in model.trained():\n"
                "                parameter.grad.nan_to_num_()\n            optimizer.step()"
            },
        ),
        WrongAnswer(
            "has the size of a micro-batch written into it",
            fails="value",
            says="n=4, one column: the parameter '0.module.weight' is wrong in",
            edits={"mse_loss(model(inputs), targets)": "(model(inputs) - targets).square().sum() / 6"},
        ),
        WrongAnswer(
            "makes no step where all gradients are 0",
            fails="value",
            also=("passes",),
            says="large targets, then gradients of 0: the parameter '0.module.weight' is wrong",
            edits={
                "            optimizer.step()": "            if any(each.grad.any() for each in model.trained()):\n"
                "                optimizer.step()"
            },
        ),
        WrongAnswer(
            "keeps the losses",
            fails="memory",
            says="n=4: a forward pass begins while a tensor of each earlier micro-batch is kept, its loss for instance",
            edits={
                "    for i,": "    losses = []\n    for i,",
                "loss.backward()": "loss.backward()\n            losses.append(loss)",
            },
        ),
        WrongAnswer(
            "takes any StopIteration for the end of the batches",
            fails="value",
            says="returned, should raise StopIteration.",
            edits={"    for i,": "    with contextlib.suppress(StopIteration):\n     for i,"},
        ),
        WrongAnswer(
            "goes on where the gradients can't be cleared",
            fails="value",
            says="SomeError in zero_grad(): returned, should raise SomeError.",
            edits={
                "optimizer.zero_grad()": "with contextlib.suppress(Exception):\n                optimizer.zero_grad()"
            },
        ),
    ),
}
