"""Other right answers to the exercises of lesson 09."""

RIGHT_ANSWERS = {
    "average_in_buckets": [
        # gradients become views of the flat tensor
        {"each.grad.copy_(part.view_as(each))": "each.grad = part.view_as(each)"},
        # one tensor a bucket that stays, and sets of what is missing
        """
        started, missing = [], [set(bucket) for bucket in buckets]
        flats = [torch.empty(sum(map(torch.numel, bucket)), dtype=bucket[0].dtype) for bucket in buckets]

        def hook(parameter):
            for each in missing:
                each.discard(parameter)
            while len(started) < len(buckets) and not missing[len(started)]:
                grads = [each.grad.flatten() / dist.get_world_size() for each in buckets[len(started)]]
                flats[len(started)].copy_(torch.cat(grads))
                started.append(dist.all_reduce(flats[len(started)], async_op=True))

        for parameter in set().union(*missing):
            parameter.register_post_accumulate_grad_hook(hook)

        def finish():
            for number, work in enumerate(started):
                work.wait()
                for each, part in zip(buckets[number], flats[number].split([each.numel() for each in buckets[number]])):
                    each.grad.copy_(part.view_as(each))
                missing[number] = set(buckets[number])
            started.clear()
        """,
    ],
    "average_through_buffer": [
        # the buffer is made in the first call; all is divided at once
        """
        buffer = views = None

        def average():
            nonlocal buffer, views
            if buffer is None:
                sizes = [parameter.numel() for parameter in parameters]
                buffer = parameters[0].new_zeros(sum(sizes))
                views = [part.view_as(each) for each, part in zip(parameters, buffer.split(sizes), strict=True)]
            for parameter, view in zip(parameters, views, strict=True):
                if parameter.grad.data_ptr() != view.data_ptr():
                    view.copy_(parameter.grad)
                parameter.grad = view
            buffer.div_(dist.get_world_size())
            dist.all_reduce(buffer)
        """,
    ],
}
