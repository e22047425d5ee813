"""Wrong answers to the exercises of lesson 09."""

from tests.course.wrong_answer import WrongAnswer

WRONG_ANSWERS = {
    "average_in_buckets": (
        WrongAnswer(
            "takes what is not contiguous for a transposed matrix",
            fails="runs",
            says="view size is not compatible",
            edits={
                "each.grad.flatten() for each in bucket": "(each.grad if each.grad.is_contiguous() else each.grad.mT)"
                ".view(-1) for each in bucket"
            },
        ),
        WrongAnswer(
            "lets three messages be under way at most",
            fails="overlap",
            says="messages had been waited for, should be 0",
            edits={
                "            bucket = buckets[len": "            if len(on_the_way) > 2:\n"
                "                on_the_way[-3][2].wait()\n            bucket = buckets[len"
            },
        ),
        WrongAnswer(
            "divides after the sum, which overflows",
            fails="value",
            says="in step 1 is",
            edits={
                "            flat /= dist.get_world_size()\n": "",
                "            work.wait()\n": "            work.wait()\n            flat /= dist.get_world_size()\n",
            },
        ),
        WrongAnswer(
            "finds a parameter's bucket by its values, which another parameter may have, too",
            fails="runs",
            says="a bucket of 260 parameters, and one of an equal one: rank 0 raised",
            edits={
                "missing[number_of[parameter]] -= 1": (
                    "own = next(n for n, bucket in enumerate(buckets) if any(\n"
                    "            each.dtype == parameter.dtype and torch.equal(each, parameter) for each in bucket))\n"
                    "        missing[own] -= 1"
                ),
                "missing[len(on_the_way)] == 0": "missing[len(on_the_way)] <= 0",
            },
        ),
        WrongAnswer(
            "sums",
            fails="value",
            says="Rank 0, step 0: the gradient of parameter 0 is wrong in",
            edits={"            flat /= dist.get_world_size()\n": ""},
        ),
        WrongAnswer(
            "the counters are not reset",
            fails="overlap",
            says="step 1, after zero_grad(set_to_none=False): when backward returned, 0 of 3 messages were started.",
            edits={"        missing[:] = map(len, buckets)  # for the next step\n": ""},
            also=("value",),
        ),
        WrongAnswer(
            "waits inside the hook",
            fails="overlap",
            says="Rank 0, step 0: when backward returned, 3 of 3 messages had been waited for, should be 0.",
            edits={
                "on_the_way.append((bucket, flat, dist.all_reduce(flat, async_op=True)))": (
                    "work = dist.all_reduce(flat, async_op=True)\n"
                    "            work.wait()\n"
                    "            on_the_way.append((bucket, flat, work))"
                ),
            },
        ),
        WrongAnswer(
            "starts a bucket when it is complete: which is first depends on the rank",
            fails="value",
            says="Rank 0, another order on each rank: the gradient of parameter 0 is wrong in",
            edits={
                "        while len(on_the_way) < len(buckets) and missing[len(on_the_way)] == 0:\n"
                "            bucket = buckets[len(on_the_way)]  # the next in the order that all ranks keep\n": (
                    "        if missing[number_of[parameter]] == 0:\n"
                    "            bucket = buckets[number_of[parameter]]\n"
                ),
            },
            also=("agreement",),
        ),
        WrongAnswer(
            "looks at the next bucket only once, though the one after it may be complete as well",
            fails="overlap",
            says="Rank 0, the last bucket is complete first: when backward returned, 1 of 3 messages were started.",
            edits={"while len(on_the_way) < len(buckets)": "if len(on_the_way) < len(buckets)"},
            also=("value",),
        ),
        WrongAnswer(
            "starts with the bucket's first gradient",
            fails="runs",
            says="raised AttributeError: 'NoneType' object has no attribute 'flatten'",
            edits={"missing[len(on_the_way)] == 0:": "missing[len(on_the_way)] < len(buckets[len(on_the_way)]):"},
        ),
        WrongAnswer(
            "all hooks share the loop's variable, which ends with the last bucket",
            fails="overlap",
            says="Rank 0, step 0: when backward returned, 0 of 3 messages were started.",
            edits={
                "missing[number_of[parameter]]": "missing[number]",
                "for parameter in number_of:": "for parameter, number in number_of.items():",
            },
            also=("value",),
        ),
        WrongAnswer(
            "only rank 0 waits",
            fails="waits",
            says="Rank 1, step 0: all_reduce was started and never waited for, 3 times. Ranks 2 and 3 too.",
            edits={"            work.wait()\n": "            if dist.get_rank() == 0:\n                work.wait()\n"},
            also=("value",),
        ),
        WrongAnswer(
            "a thread for each message",
            fails="runs",
            says="calls all_reduce from another thread: then nothing keeps the order that all ranks share.",
            edits={
                "on_the_way.append((bucket, flat, dist.all_reduce(flat, async_op=True)))": (
                    "import threading\n"
                    "            thread = threading.Thread(target=dist.all_reduce, args=(flat,))\n"
                    "            thread.start()\n"
                    "            on_the_way.append((bucket, flat, thread))"
                ),
                "work.wait()": "work.join()",
            },
        ),
        WrongAnswer(
            "all calls share a table, in a name of the notebook",
            fails="runs",
            says="'number_of' is not defined: an earlier call of the function has left it where all calls share it",
            edits={"    number_of = {": "    global number_of\n    number_of = {"},
        ),
        WrongAnswer(
            "a message for each gradient",
            fails="cost",
            says="calls all_reduce 6 times, budget 3",
            body="""
def hook(parameter):
    parameter.grad /= dist.get_world_size()
    on_the_way.append(dist.all_reduce(parameter.grad, async_op=True))

for bucket in buckets:
    for parameter in bucket:
        parameter.register_post_accumulate_grad_hook(hook)

def finish():
    for work in on_the_way:
        work.wait()
    on_the_way.clear()
""",
            also=("value", "agreement"),
        ),
        WrongAnswer(
            "starts everything with the last gradient of all",
            fails="overlap",
            says="Rank 0, step 0: all gradients of a bucket were complete, and the all-reduce was started only later.",
            edits={"missing[len(on_the_way)] == 0:": "not any(missing):"},
        ),
        WrongAnswer(
            "the means stay in the flat tensor",
            fails="value",
            says="Rank 0, step 0: the gradient of parameter 0 is wrong in",
            edits={"                each.grad.copy_(part.view_as(each))": "                part.view_as(each)"},
            also=("agreement",),
        ),
        WrongAnswer(
            "puts the parts together in the order of arrival",
            fails="value",
            says="another order on each rank: the gradient of parameter",
            edits={
                "        missing[number_of[parameter]] -= 1\n": (
                    "        missing[number_of[parameter]] -= 1\n        arrived.append(parameter)\n"
                ),
                "    def hook(": "    arrived = []\n\n    def hook(",
                "bucket = buckets[len(on_the_way)]  #": (
                    "bucket = [each for each in arrived if number_of[each] == len(on_the_way)]  #"
                ),
                "        on_the_way.clear()\n": "        on_the_way.clear()\n        arrived.clear()\n",
            },
            also=("agreement",),
        ),
        WrongAnswer(
            "takes a bucket for complete when every .grad is there, be it the zeros of zero_grad()",
            fails="value",
            says="step 1, after zero_grad(set_to_none=False): the gradient of parameter",
            edits={
                "missing[len(on_the_way)] == 0": "all(each.grad is not None for each in buckets[len(on_the_way)])",
            },
        ),
        WrongAnswer(
            "keeps the flat tensors of all steps",
            fails="memory",
            says="bytes more are held than after step 0: let go of them",
            edits={
                "    def hook(": "    history = []\n\n    def hook(",
                "            flat /= dist": "            history.append(flat)\n            flat /= dist",
            },
        ),
        WrongAnswer(
            "empties the caller's buckets in finish()",
            fails="untouched",
            says="buckets has other entries than before",
            edits={
                "    number_of = {": (
                    "    given, buckets = buckets, [list(each) for each in buckets]\n    number_of = {"
                ),
                "        on_the_way.clear()\n": "        given.clear()\n        on_the_way.clear()\n",
            },
        ),
        WrongAnswer(
            "lets go of the handles only in the next step",
            fails="memory",
            says="step 0: 3 handles are still kept",
            edits={
                "        on_the_way.clear()\n": "        finish.last = list(on_the_way)\n        on_the_way.clear()\n",
            },
        ),
        WrongAnswer(
            "sends a large bucket in pieces",
            fails="cost",
            says="a bucket with a large parameter: calls all_reduce 5 times, budget 1.",
            edits={
                "dist.all_reduce(flat, async_op=True)": (
                    "[dist.all_reduce(part, async_op=True) for part in flat.split(2**16)]"
                ),
                "work.wait()": "[each.wait() for each in work]",
            },
        ),
    ),
    "average_through_buffer": (
        WrongAnswer(
            "leaves tensors of inference mode",
            fails="views",
            says="the gradients are made in inference mode: nobody may change them in place outside of it",
            body="""
            sizes = [parameter.numel() for parameter in parameters]
            with torch.inference_mode():
                buffer = parameters[0].new_zeros(sum(sizes))
                views = [part.view_as(each) for each, part in zip(parameters, buffer.split(sizes), strict=True)]

            @torch.inference_mode()
            def average():
                for parameter, view in zip(parameters, views, strict=True):
                    torch.div(parameter.grad, dist.get_world_size(), out=view)
                    parameter.grad = view
                dist.all_reduce(buffer)
            """,
        ),
        WrongAnswer(
            "gives the views the parameters' strides, also where those have gaps",
            fails="value",
            says="gradient of parameter 4 ((2, 3, 4), float64)",
            edits={
                "    views = [part.view_as(each) for each, part in zip(parameters, parts, strict=True)]\n": (
                    "    views = [\n"
                    "        part.as_strided(each.shape, each.stride(), part.storage_offset())\n"
                    "        for each, part in zip(parameters, parts, strict=True)\n"
                    "    ]\n"
                )
            },
        ),
        WrongAnswer(
            "the buffer requires a gradient",
            fails="untouched",
            says="the gradient of '0.weight': requires_grad is True, should be False",
            edits={"parameter.grad = view": "parameter.grad = view\n        buffer.requires_grad_()"},
        ),
        WrongAnswer(
            "flattens gradients that are not contiguous",
            fails="memory",
            says="average() allocates",
            edits={
                "torch.div(parameter.grad, dist.get_world_size(), out=view)  #": (
                    "torch.div(parameter.grad.reshape(-1), dist.get_world_size(), out=view.view(-1))  #"
                ),
            },
        ),
        WrongAnswer(
            "keeps what backward has made",
            fails="memory",
            says="6 gradients that backward has made are still there",
            edits={
                "    def average():\n": "    before = []\n\n    def average():\n"
                "        before[:] = [parameter.grad for parameter in parameters]\n"
            },
        ),
        WrongAnswer(
            "a second room, made beforehand",
            fails="memory",
            says="bytes beside the gradients, and one tensor has",
            edits={
                "    def average():\n": "    scratch = [view.clone() for view in views]\n\n    def average():\n",
                "torch.div(parameter.grad, dist.get_world_size(), out=view)  # also if it is the view": "pass\n"
                "        for parameter, room, view in zip(parameters, scratch, views, strict=True):\n"
                "            view.copy_(room.copy_(parameter.grad)).div_(dist.get_world_size())",
            },
        ),
        WrongAnswer(
            "sums",
            fails="value",
            says="Rank 0, the first step: the gradient of parameter 0 is wrong in",
            edits={
                "torch.div(parameter.grad, dist.get_world_size(), out=view)  # also if it is the view": (
                    "view.copy_(parameter.grad)"
                )
            },
        ),
        WrongAnswer(
            "a new flat array in each step, in numpy",
            fails="memory",
            says="elements out of torch by .numpy()",
            edits={
                "        dist.all_reduce(buffer)\n": (
                    "        import numpy as np\n"
                    "        np.concatenate([each.grad.numpy().ravel() for each in parameters])\n"
                    "        dist.all_reduce(buffer)\n"
                )
            },
        ),
        WrongAnswer(
            "a new flat tensor in each step",
            fails="memory",
            says="Rank 0, after zero_grad(): average() allocates",
            body="""
def average():
    flat = torch.cat([each.grad.flatten() for each in parameters])
    flat /= dist.get_world_size()
    dist.all_reduce(flat)
    for each, part in zip(parameters, flat.split([each.numel() for each in parameters]), strict=True):
        each.grad = part.view_as(each)
""",
            also=("views",),
        ),
        WrongAnswer(
            "the gradients are views from the beginning, and nobody looks again",
            fails="value",
            says="Rank 0, the first step: the gradient of parameter 0 is wrong in",
            edits={
                "    def average():\n": (
                    "    for parameter, view in zip(parameters, views, strict=True):\n"
                    "        parameter.grad = view\n\n    def average():\n"
                ),
                "        for parameter, view in zip(parameters, views, strict=True):\n            torch.div("
                "parameter.grad, dist.get_world_size(), out=view)  # also if it is the view\n": (
                    "        buffer.div_(dist.get_world_size())\n"
                ),
                "        dist.all_reduce(buffer)\n        for parameter, view in zip(parameters, views, strict=True):\n"
                "            parameter.grad = view": ("        dist.all_reduce(buffer)"),
            },
            also=("agreement", "views"),
        ),
        WrongAnswer(
            "the first gradient tells whether all of them are views",
            fails="value",
            says="gradients cleared in many ways",
            edits={
                "    def average():\n": "    def average():\n        there = parameters[0].grad is views[0]\n",
                "            torch.div(": "            if there:\n                view.div_(dist.get_world_size())\n"
                "                continue\n            torch.div(",
            },
        ),
        WrongAnswer(
            "0 times what was there: NaN stays for good",
            fails="value",
            says="in step 1 is",
            edits={
                "torch.div(parameter.grad, dist.get_world_size(), out=view)  # also if it is the view": (
                    "n = dist.get_world_size()\n            if parameter.grad.data_ptr() == view.data_ptr():\n"
                    "                view.div_(n)\n            else:\n"
                    "                view.mul_(0).add_(parameter.grad, alpha=1 / n)"
                )
            },
        ),
        WrongAnswer(
            "only what is copied in is divided",
            fails="value",
            says="Rank 0, after zero_grad(set_to_none=False): the gradient of parameter 0 is wrong in",
            edits={
                "            torch.div(": (
                    "            if parameter.grad.data_ptr() != view.data_ptr():\n                torch.div("
                )
            },
        ),
        WrongAnswer(
            "adds to what is left of the step before",
            fails="value",
            says="Rank 0, after zero_grad(): the gradient of parameter 0 is wrong in",
            edits={
                "torch.div(parameter.grad, dist.get_world_size(), out=view)  # also if it is the view": (
                    "view.add_(parameter.grad, alpha=1 / dist.get_world_size())"
                )
            },
        ),
        WrongAnswer(
            "copies the means back into gradients of their own",
            fails="views",
            says="Rank 0, the first step: the gradients lie in 6 tensors, should be views of one.",
            edits={"            parameter.grad = view": "            parameter.grad.copy_(view)"},
        ),
        WrongAnswer(
            "divides into a new tensor first",
            fails="memory",
            says="Rank 0, after zero_grad(): average() allocates",
            edits={
                "torch.div(parameter.grad, dist.get_world_size(), out=view)  # also if it is the view": (
                    "view.copy_(parameter.grad / dist.get_world_size())"
                )
            },
        ),
        WrongAnswer(
            "a message for each view",
            fails="cost",
            says="calls all_reduce 6 times, budget 1",
            edits={
                "        dist.all_reduce(buffer)": "        for view in views:\n            dist.all_reduce(view)",
            },
        ),
        WrongAnswer(
            "sends a large buffer in pieces",
            fails="cost",
            says="a large parameter: calls all_reduce 5 times, budget 1.",
            edits={
                "dist.all_reduce(buffer)": "[dist.all_reduce(part) for part in buffer.split(2**16)]",
            },
        ),
    ),
}
