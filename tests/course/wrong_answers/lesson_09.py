"""Wrong answers to the exercises of lesson 09."""

from tests.course.answers import WrongAnswer

WRONG_ANSWERS = {
    "average_in_buckets": (
        WrongAnswer(
            "sums",
            "value",
            "the same order on all ranks: step 0: the gradient of 'below.weight'",
            {"            flat /= dist.get_world_size()\n": ""},
        ),
        WrongAnswer(
            "the counters are not reset",
            "overlap",
            "step 1: the number of messages started before the first layer's backward is 0,",
            {"        missing[:] = map(len, buckets)  # for the next step\n": ""},
        ),
        WrongAnswer(
            "waits inside the hook",
            "overlap",
            "step 0: the number of messages waited for when backward returned is 3, should be 0",
            {
                "on_the_way.append((bucket, flat, dist.all_reduce(flat, async_op=True)))": (
                    "work = dist.all_reduce(flat, async_op=True)\n"
                    "            work.wait()\n"
                    "            on_the_way.append((bucket, flat, work))"
                )
            },
        ),
        WrongAnswer(
            "starts a bucket when it is complete: which is first depends on the rank",
            "value",
            "another order on odd ranks: step 0: the gradient of 'left.weight'",
            {
                (
                    "        while len(on_the_way) < len(buckets) and missing[len(on_the_way)] == 0:\n"
                    "            bucket = buckets[len(on_the_way)]  # the next in the order that all "
                    "ranks keep\n"
                ): (
                    "        if missing[number_of[parameter]] == 0:\n"
                    "            bucket = buckets[number_of[parameter]]\n"
                )
            },
        ),
        WrongAnswer(
            "starts everything with the last gradient of all",
            "overlap",
            "step 0: the number of messages started before the first layer's backward is 0,",
            {"missing[len(on_the_way)] == 0:": "not any(missing):"},
        ),
        WrongAnswer(
            "the means stay in the flat tensor",
            "value",
            "the same order on all ranks: step 0: the gradient of 'below.weight'",
            {"                each.grad.copy_(part.view_as(each))": "                part.view_as(each)"},
        ),
        WrongAnswer(
            "puts a bucket together in the order of arrival",
            "value",
            "buckets of two layers, in another order on odd ranks: step 0: the gradient of 'left.",
            {
                "    def hook(": "    arrived = []\n\n    def hook(",
                "        missing[number_of[parameter]] -= 1\n": (
                    "        missing[number_of[parameter]] -= 1\n        arrived.append(parameter)\n"
                ),
                "bucket = buckets[len(on_the_way)]  #": (
                    "bucket = [each for each in arrived if number_of[each] == len(on_the_way)]  #"
                ),
                "        on_the_way.clear()\n": "        on_the_way.clear()\n        arrived.clear()\n",
            },
        ),
        WrongAnswer(
            "a message for each gradient",
            "overlap",
            "step 0: the number of messages started before the first layer's backward is 4,",
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
        ),
    ),
    "average_through_buffer": (
        WrongAnswer(
            "sums",
            "value",
            "five steps: gradients set to None: the gradient of parameter 0",
            {"torch.div(parameter.grad, dist.get_world_size(), out=view)": "view.copy_(parameter.grad)"},
        ),
        WrongAnswer(
            "a new flat tensor in each step",
            "memory",
            "gradients set to zeros: the tensor that they are views of is a new one, should be",
            body="""
            def average():
                flat = torch.cat([each.grad.flatten() for each in parameters])
                flat /= dist.get_world_size()
                dist.all_reduce(flat)
                for each, part in zip(parameters, flat.split([each.numel() for each in parameters]), strict=True):
                    each.grad = part.view_as(each)
            """,
        ),
        WrongAnswer(
            "the gradients are views from the beginning, and nobody looks again",
            "value",
            "five steps: gradients set to None: the gradient of parameter 0",
            {
                "    def average():\n": (
                    "    for parameter, view in zip(parameters, views, "
                    "strict=True):\n        parameter.grad = view\n\n"
                    "    def average():\n"
                ),
                (
                    "        for parameter, view in zip(parameters, views, strict=True):\n"
                    "            torch.div(parameter.grad, dist.get_world_size(), out=view)  # also if "
                    "it is the view\n"
                ): "        buffer.div_(dist.get_world_size())\n",
                (
                    "        dist.all_reduce(buffer)\n"
                    "        for parameter, view in zip(parameters, views, strict=True):\n"
                    "            parameter.grad = view"
                ): "        dist.all_reduce(buffer)",
            },
        ),
        WrongAnswer(
            "divides into a new tensor first",
            "memory",
            "gradients set to zeros: the number of elements held beside them and the tensor is 12, should be 0",
            {
                "torch.div(parameter.grad, dist.get_world_size(), out=view)": (
                    "view.copy_(parameter.grad / dist.get_world_size())"
                )
            },
        ),
        WrongAnswer(
            "copies the means back into gradients of their own",
            "memory",
            "gradients set to None: the number of tensors that they are views of is 2, should be 1",
            {"            parameter.grad = view": "            parameter.grad.copy_(view)"},
        ),
        WrongAnswer(
            "a message for each view",
            "cost",
            "ranks, five steps: rank 0 calls all_reduce 10 times, budget 5",
            {"        dist.all_reduce(buffer)": "        for view in views:\n            dist.all_reduce(view)"},
        ),
        WrongAnswer(
            "adds to what is left of the step before",
            "value",
            "five steps: gradients set to zeros: the gradient of parameter 0",
            {
                "torch.div(parameter.grad, dist.get_world_size(), out=view)": (
                    "view.add_(parameter.grad / dist.get_world_size())"
                )
            },
        ),
    ),
}
