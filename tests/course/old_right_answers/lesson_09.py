"""Unusual right answers of lesson 09: edits of the reference, other bodies, or whole cells."""

RIGHT_ANSWERS = {
    "average_in_buckets": [
        # keeps the last step's flat tensors (room that stays, no handles)
        """
        missing = [len(bucket) for bucket in buckets]  # how many gradients each of them waits for
        on_the_way = []
        number_of = {parameter: number for number, bucket in enumerate(buckets) for parameter in bucket}

        def hook(parameter):
            missing[number_of[parameter]] -= 1
            while len(on_the_way) < len(buckets) and missing[len(on_the_way)] == 0:
                bucket = buckets[len(on_the_way)]  # the next in the order that all ranks keep
                flat = torch.cat([each.grad.flatten() for each in bucket])
                flat /= dist.get_world_size()
                on_the_way.append((bucket, flat, dist.all_reduce(flat, async_op=True)))

        for parameter in number_of:
            parameter.register_post_accumulate_grad_hook(hook)

        def finish():
            for bucket, flat, work in on_the_way:
                work.wait()
                parts = flat.split([each.numel() for each in bucket])
                for each, part in zip(bucket, parts, strict=True):
                    each.grad.copy_(part.view_as(each))
            finish.last = [flat for _, flat, _ in on_the_way]
            on_the_way.clear()
            missing[:] = map(len, buckets)  # for the next step

        return finish
        """,
        # gradients become views of the flat tensor
        """
        missing = [len(bucket) for bucket in buckets]  # how many gradients each of them waits for
        on_the_way = []
        number_of = {parameter: number for number, bucket in enumerate(buckets) for parameter in bucket}

        def hook(parameter):
            missing[number_of[parameter]] -= 1
            while len(on_the_way) < len(buckets) and missing[len(on_the_way)] == 0:
                bucket = buckets[len(on_the_way)]  # the next in the order that all ranks keep
                flat = torch.cat([each.grad.flatten() for each in bucket])
                flat /= dist.get_world_size()
                on_the_way.append((bucket, flat, dist.all_reduce(flat, async_op=True)))

        for parameter in number_of:
            parameter.register_post_accumulate_grad_hook(hook)

        def finish():
            for bucket, flat, work in on_the_way:
                work.wait()
                parts = flat.split([each.numel() for each in bucket])
                for each, part in zip(bucket, parts, strict=True):
                    each.grad = part.view_as(each)
            on_the_way.clear()
            missing[:] = map(len, buckets)  # for the next step

        return finish
        """,
        # a tensor's own hook, which gets the gradient
        """
        missing = [len(bucket) for bucket in buckets]  # how many gradients each of them waits for
        on_the_way = []
        number_of = {parameter: number for number, bucket in enumerate(buckets) for parameter in bucket}

        got = {}

        def hook(parameter, gradient):
            got[parameter] = gradient
            missing[number_of[parameter]] -= 1
            while len(on_the_way) < len(buckets) and missing[len(on_the_way)] == 0:
                bucket = buckets[len(on_the_way)]  # the next in the order that all ranks keep
                flat = torch.cat([got.pop(each).flatten() for each in bucket])
                flat /= dist.get_world_size()
                on_the_way.append((bucket, flat, dist.all_reduce(flat, async_op=True)))

        for parameter in number_of:
            parameter.register_hook(lambda g, p=parameter: hook(p, g))

        def finish():
            for bucket, flat, work in on_the_way:
                work.wait()
                parts = flat.split([each.numel() for each in bucket])
                for each, part in zip(bucket, parts, strict=True):
                    each.grad.copy_(part.view_as(each))
            on_the_way.clear()
            missing[:] = map(len, buckets)  # for the next step

        return finish
        """,
        # divides the gradients in place
        """
        missing = [len(bucket) for bucket in buckets]  # how many gradients each of them waits for
        on_the_way = []
        number_of = {parameter: number for number, bucket in enumerate(buckets) for parameter in bucket}

        def hook(parameter):
            missing[number_of[parameter]] -= 1
            parameter.grad /= dist.get_world_size()
            while len(on_the_way) < len(buckets) and missing[len(on_the_way)] == 0:
                bucket = buckets[len(on_the_way)]  # the next in the order that all ranks keep
                flat = torch.cat([each.grad.flatten() for each in bucket])
                on_the_way.append((bucket, flat, dist.all_reduce(flat, async_op=True)))

        for parameter in number_of:
            parameter.register_post_accumulate_grad_hook(hook)

        def finish():
            for bucket, flat, work in on_the_way:
                work.wait()
                parts = flat.split([each.numel() for each in bucket])
                for each, part in zip(bucket, parts, strict=True):
                    each.grad.copy_(part.view_as(each))
            on_the_way.clear()
            missing[:] = map(len, buckets)  # for the next step

        return finish
        """,
        # a hook with its bucket's number, one tensor a bucket that stays, averaged by foreach
        """
        import functools

        n, started = dist.get_world_size(), []
        missing = [set(bucket) for bucket in buckets]
        flats = [torch.empty(sum(map(torch.numel, bucket)), dtype=bucket[0].dtype) for bucket in buckets]

        def hook(number, parameter):
            missing[number].discard(parameter)
            while len(started) < len(buckets) and not missing[len(started)]:
                bucket, flat = buckets[len(started)], flats[len(started)]
                grads = [each.grad for each in bucket]
                torch._foreach_div_(grads, float(n))
                torch.cat([grad.reshape(-1) for grad in grads], out=flat)
                started.append(dist.all_reduce(flat, async_op=True))

        for number, bucket in enumerate(buckets):
            for parameter in bucket:
                parameter.register_post_accumulate_grad_hook(functools.partial(hook, number))

        def finish():
            for number, work in enumerate(started):
                work.wait()
                begin = 0
                for parameter in buckets[number]:
                    parameter.grad.copy_(flats[number][begin : begin + parameter.numel()].view_as(parameter))
                    begin += parameter.numel()
                missing[number] = set(buckets[number])
            started.clear()

        return finish
        """,
    ],
    "average_through_buffer": [
        {
            "parameter.grad = view": "parameter.grad = parameter.grad if parameter.grad is view else view",
        },
        # keeps the handle of a message that has ended
        {
            "    def average():\n": "    last = []\n\n    def average():\n",
            "        dist.all_reduce(buffer)\n": (
                "        last[:] = [dist.all_reduce(buffer, async_op=True)]\n        last[0].wait()\n"
            ),
        },
        # allocates 256 bytes in every call
        """
        sizes = [parameter.numel() for parameter in parameters]
        buffer = parameters[0].new_zeros(sum(sizes))
        parts = buffer.split(sizes)
        views = [part.view_as(each) for each, part in zip(parameters, parts, strict=True)]

        kept = []

        def average():
            kept.append(torch.zeros(64))
            for parameter, view in zip(parameters, views, strict=True):
                torch.div(parameter.grad, dist.get_world_size(), out=view)  # also if it is the view
            dist.all_reduce(buffer)
            for parameter, view in zip(parameters, views, strict=True):
                parameter.grad = view

        return average
        """,
        # the buffer is made in the first call
        """
        sizes = [parameter.numel() for parameter in parameters]
        buffer = views = None

        def average():
            nonlocal buffer, views
            if buffer is None:
                buffer = parameters[0].new_zeros(sum(sizes))
                views = [part.view_as(each) for each, part in zip(parameters, buffer.split(sizes), strict=True)]
            for parameter, view in zip(parameters, views, strict=True):
                torch.div(parameter.grad, dist.get_world_size(), out=view)  # also if it is the view
            dist.all_reduce(buffer)
            for parameter, view in zip(parameters, views, strict=True):
                parameter.grad = view

        return average
        """,
        # copies unless the address is the view's, then divides all at once
        """
        sizes = [parameter.numel() for parameter in parameters]
        buffer = parameters[0].new_zeros(sum(sizes))
        parts = buffer.split(sizes)
        views = [part.view_as(each) for each, part in zip(parameters, parts, strict=True)]

        def average():
            for parameter, view in zip(parameters, views, strict=True):
                if parameter.grad.data_ptr() != view.data_ptr(): view.copy_(parameter.grad)
            buffer.div_(dist.get_world_size())
            dist.all_reduce(buffer)
            for parameter, view in zip(parameters, views, strict=True):
                parameter.grad = view

        return average
        """,
        # a new view in each call, by narrow
        """
        sizes = [parameter.numel() for parameter in parameters]
        buffer = parameters[0].new_zeros(sum(sizes))
        parts = buffer.split(sizes)
        views = [part.view_as(each) for each, part in zip(parameters, parts, strict=True)]

        def average():
            for parameter, view in zip(parameters, views, strict=True):
                torch.div(parameter.grad, dist.get_world_size(), out=view)  # also if it is the view
            dist.all_reduce(buffer)
            for parameter, view in zip(parameters, views, strict=True):
                parameter.grad = view.detach()

        return average
        """,
    ],
}
