"""Unusual right answers of lesson 12: edits of the reference, other bodies, or whole cells."""

RIGHT_ANSWERS = {
    "split_step": [
        {"parts = [0.0, 0.0, 0.0, 0.0]": "parts = [0, 0, 0, 0]"},
        {
            "moments = {start, end, *(at for each in [*computing, *mine] for at in each)}": (
                "moments = {start, end}\n    for each in [*computing, *mine]:\n        moments.update(each)"
            )
        },
        {
            "since <= a and b <= until for": "since <= (a + b) / 2 < until for",
            "since <= a and b <= ended for": "since < b and a < ended and since <= a for",
        },
        {"max(called for called, _ in same)": "sorted(same)[-1][0]"},
        """
        def cut(pieces, holes):
            for low, high in holes:
                pieces = [(a, b) for x, y in pieces for a, b in ((x, min(y, low)), (max(x, high), y)) if a < b]
            return pieces

        def seconds(pieces):
            return sum((b - a for a, b in pieces), 0.0)

        left, parts = [step], []
        ready = [max(each[k][0] for each in calls) for k in range(len(calls[rank]))]
        for intervals in (
            computing,
            [(since, ended) for since, (_, ended) in zip(ready, calls[rank], strict=True)],
            calls[rank],
        ):
            parts.append(seconds(left) - seconds(cut(left, intervals)))
            left = cut(left, intervals)
        computed, transfer, waiting = parts
        return [computed, waiting, transfer, seconds(left)]
        """,
    ],
    "find_straggler": [
        {"torch.empty_like(called) for": "torch.zeros_like(called) for"},
        {"sum(last - at for at in same)": "last * len(same) - sum(same)"},
        {"each.tolist() for each in everyones": "(each - everyones[0].min()).tolist() for each in everyones"}
        | {"    waited_for = [0]": "    if not len(called):\n        return None\n    waited_for = [0]"},
        {
            "dist.all_gather(everyones, called, group=group)": (
                "dist.all_gather(everyones, called, group=group, async_op=True).wait()"
            )
        },
        """
        n = dist.get_world_size(group)
        table = torch.zeros(n, len(called), dtype=called.dtype, device=called.device)
        dist.all_gather(list(table.unbind()), called, group=group)
        late = table.amax(dim=0) - table
        first = [next(r for r in range(n) if late[r, k] == 0) for k in range(len(called))]
        cost = [sum(int(late[:, k].sum()) for k in range(len(called)) if first[k] == r) for r in range(n)]
        return max(range(n), key=cost.__getitem__) if any(cost) else None
        """,
    ],
    "sync_batch_norm": [
        {
            "        exact = x.double()": "        shift = per_feature(norm.running_mean.detach().clone())\n"
            "        exact = x.double() - shift",
            "mean = total[:features] / count": "mean = total[:features] / count",
            "variance = (total[features:-1] / count - mean.square()).clamp(min=0)": (
                "variance = (total[features:-1] / count - mean.square()).clamp(min=0)\n"
                "        mean = mean + shift.flatten()"
            ),
        },
        {
            "    mean, scale = mean.to(x.dtype), scale.to(x.dtype)\n": "",
            "return (x - per_feature(mean)) * per_feature(scale * norm.weight) + per_feature(norm.bias)": (
                "y = (x - per_feature(mean)) * per_feature(scale * norm.weight) + per_feature(norm.bias)\n"
                "    return y.to(x.dtype)"
            ),
        },
        {"exact.square().sum(others), count]": "(exact * exact).sum(others), count]"},
        {"running.lerp_(value.to(running.dtype), share)": "running.copy_((1 - share) * running + share * value)"},
        """
        def add_up(*tensors):
            total = torch.cat([each.reshape(-1) for each in tensors]).double()
            dist.all_reduce(total, group=group)
            return total

        class Norm(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, weight, bias):
                exact = x.double()
                rows = exact.new_tensor([x.numel() // features])
                total = add_up(rows, exact.sum(others), (exact**2).sum(others))
                ctx.count, mean = total[0], total[1 : features + 1] / total[0]
                variance = total[features + 1 :] / ctx.count - mean**2
                keep, unbiased = 1 - norm.momentum, variance * ctx.count / (ctx.count - 1)
                norm.running_mean.mul_(keep).add_(norm.momentum * mean)
                norm.running_var.mul_(keep).add_(norm.momentum * unbiased)
                norm.num_batches_tracked.add_(1)
                ctx.scale = (variance + norm.eps).rsqrt()
                normed = (exact - per_feature(mean)) * per_feature(ctx.scale)
                ctx.save_for_backward(normed, weight)
                return (normed * per_feature(weight) + per_feature(bias)).to(x.dtype)

            @staticmethod
            def backward(ctx, gradient):
                normed, weight = ctx.saved_tensors
                ones, twos = gradient.double().sum(others), (gradient * normed).sum(others)
                means = add_up(ones, twos) / ctx.count
                inner = gradient - per_feature(means[:features]) - normed * per_feature(means[features:])
                x_grad = inner * per_feature(ctx.scale * weight)
                return x_grad.to(gradient.dtype), twos.to(weight.dtype), ones.to(weight.dtype)

        if norm.training:
            return Norm.apply(x, norm.weight, norm.bias)
        return norm(x)
        """,
    ],
}
