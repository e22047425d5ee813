"""Unusual right answers of lesson 11: edits of the reference, other bodies, or whole cells."""

RIGHT_ANSWERS = {
    "sharded_optimizer": [
        # sends a copy
        """
        rank, n = dist.get_rank(), dist.get_world_size()
        own = make(params[rank::n])

        def step():
            own.step()
            for i, parameter in enumerate(params):
                copy = parameter.detach() + 0.0
                dist.broadcast(copy, src=i % n)
                parameter.detach().copy_(copy)

        def zero_grad():
            for parameter in params:
                parameter.grad = None

        return own, step, zero_grad
        """,
        # a copy of all weights is kept, which nothing forbids
        """
        rank, n = dist.get_rank(), dist.get_world_size()
        all_of_them = [p.detach().clone() for p in params]
        own = make(params[rank::n])

        def step():
            own.step()
            for i, parameter in enumerate(params):
                dist.broadcast(parameter.detach(), src=i % n)

        def zero_grad():
            for parameter in params:
                parameter.grad = None

        return own, step, zero_grad
        """,
        # an owner at a time
        """
        rank, n = dist.get_rank(), dist.get_world_size()
        owned = [params[owner::n] for owner in range(n)]
        own = make(owned[rank])

        def step():
            own.step()
            for owner, theirs in enumerate(owned):
                for p in theirs:
                    dist.broadcast(p.data, owner)

        def zero_grad():
            for p in params:
                p.grad = None

        return own, step, zero_grad
        """,
        # asynchronous broadcasts, waited for at the end
        """
        rank, n = dist.get_rank(), dist.get_world_size()
        own = make(params[rank::n])

        def step():
            own.step()
            works = [dist.broadcast(p.detach(), src=i % n, async_op=True) for i, p in enumerate(params)]
            [work.wait() for work in works]

        def zero_grad():
            for parameter in params:
                parameter.grad = None

        return own, step, zero_grad
        """,
        # what has no gradient is not sent
        """
        rank, n = dist.get_rank(), dist.get_world_size()
        own = make(params[rank::n])

        def step():
            own.step()
            for i, parameter in enumerate(params):
                if parameter.grad is not None: dist.broadcast(parameter.detach(), src=i % n)

        def zero_grad():
            for parameter in params:
                parameter.grad = None

        return own, step, zero_grad
        """,
    ],
    "reduce_to_owners": [
        {
            "dist.reduce(parameter.grad, dst=i % n)\n": "work = dist.reduce(parameter.grad, dst=i % n, async_op=True)\n"
            "        while not work.is_completed():\n            pass\n        work.wait()\n"
        },
        {"parameter.grad /= n": "parameter.grad.mul_(1 / n)"},
        # largest first
        """
        rank, n = dist.get_rank(), dist.get_world_size()
        for i, parameter in sorted(enumerate(params), key=lambda each: -each[1].numel()):
            parameter.grad /= n
            dist.reduce(parameter.grad, dst=i % n)
            if i % n != rank:
                parameter.grad = None
        """,
        # asynchronous, waited for at the end
        """
        rank, n = dist.get_rank(), dist.get_world_size()
        works = []
        for i, p in enumerate(params):
            works.append(dist.reduce(p.grad.div_(n), dst=i % n, async_op=True))
        for i, (p, work) in enumerate(zip(params, works)):
            work.wait()
            if i % n != rank:
                del p.grad
        """,
        # into a copy
        """
        rank, n = dist.get_rank(), dist.get_world_size()
        for i, p in enumerate(params):
            mean = p.grad / n
            dist.reduce(mean, i % n)
            p.grad = mean if i % n == rank else None
        """,
        # an owner at a time
        """
        rank, n = dist.get_rank(), dist.get_world_size()
        for owner in range(n):
            for p in params[owner::n]:
                torch.div(p.grad, n, out=p.grad)
                dist.reduce(p.grad, dst=owner)
                if rank != owner:
                    p.grad = None
        """,
    ],
    "bytes_held": [
        {"return 4 * (weights + gradients + state)": "return sum(4 * part for part in (weights, gradients, state))"},
        # 16 numbers minus what is shared
        """
        shared = (0, 8, 12, 16)[stage]
        return (16 - shared) * parameters + shared * parameters // n
        """,
        # a match
        """
        share = parameters // n
        match stage:
            case 0:
                return 16 * parameters
            case 1:
                return 8 * parameters + 8 * share
            case 2:
                return 4 * parameters + 12 * share
            case _:
                return 16 * share
        """,
        # ceil, which is the same as n divides
        """
        share = -(-parameters // n)
        weights = share if stage >= 3 else parameters
        gradients = share if stage >= 2 else parameters
        state = 2 * (share if stage >= 1 else parameters)
        return 4 * (weights + gradients + state)
        """,
        # a table of what is whole
        """
        whole = {0: 4, 1: 2, 2: 1, 3: 0}[stage]
        return 4 * (whole * parameters + (4 - whole) * (parameters // n))
        """,
    ],
}
