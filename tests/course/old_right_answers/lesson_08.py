"""Unusual right answers of lesson 08: edits of the reference, other bodies, or whole cells."""

RIGHT_ANSWERS = {
    "average_when_ready": [
        # hooks of the nodes that add up gradients
        """
        works, nodes = [], []

        def start(parameter, *_):
            parameter.grad /= dist.get_world_size()
            works.append(dist.all_reduce(parameter.grad, async_op=True))

        for parameter in model.parameters():
            if parameter.requires_grad:
                nodes.append(parameter.view_as(parameter).grad_fn.next_functions[0][0])
                nodes[-1].register_hook(lambda *_, parameter=parameter: start(parameter))

        def finish():
            while works:
                works.pop().wait()

        finish.nodes = nodes  # a node lives as long as somebody has it
        """,
        {
            "parameter.grad /= dist": "parameter.grad = parameter.grad / dist",
            "works.append(dist.all_reduce(parameter.grad, async_op=True))": (
                "sent = parameter.grad.contiguous()\n"
                "        works.append((dist.all_reduce(sent, async_op=True), sent, parameter))"
            ),
            "for work in works:\n            work.wait()": (
                "for work, sent, parameter in works:\n            work.wait()\n            parameter.grad.copy_(sent)"
            ),
        },
        {
            "for work in works:\n            work.wait()\n        works.clear()": (
                "while works:\n            works.pop().wait()"
            ),
        },
        {"work.wait()": "work.get_future().wait()"},
        {
            "(parameter.grad, async_op=True))": "(parameter.grad, async_op=True).get_future())",
        },
        # pieces of the sum by n before, in a new tensor in .grad
        """
        import time, gc
        from itertools import pairwise

        works = []
        n = dist.get_world_size()

        def hook(parameter):
            parameter.grad = parameter.grad / n
            works.append(dist.all_reduce(parameter.grad, async_op=True))

        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(hook)

        def finish():
            for work in works:
                work.wait()
            works.clear()

        return finish
        """,
    ],
    "exposed_time": [
        {"exposed = 0.0": "exposed = 0"},
        # sweep with counts
        """
        events = []
        for kind, stretches in ((0, compute), (1, communication)):
            for a, b in stretches:
                events += [(a, kind, 1), (b, kind, -1)]
        counts, last, total = [0, 0], None, 0.0
        for when, kind, step in sorted(events):
            if counts[1] and not counts[0]:
                total += when - last
            counts[kind] += step
            last = when
        return total
        """,
        # union of both less union of computing
        """
        def union(stretches):
            total, reached = 0.0, float("-inf")
            for a, b in sorted(stretches):
                if b > reached:
                    total += b - max(a, reached)
                    reached = b
            return total

        def exposed_time(compute, communication):
            return union(compute + communication) - union(compute)
        """,
        # cut computing out of each piece, messages first made disjoint
        """
        from itertools import pairwise

        pieces, until = [], float("-inf")
        for s, e in sorted(communication):
            if e > until:
                pieces.append((max(s, until), e))
                until = e
        for a, b in compute:
            if a < b:
                halves = ((s, min(e, a), max(s, b), e) for s, e in pieces)
                pieces = [part for s, left, right, e in halves for part in ((s, left), (right, e)) if part[0] < part[1]]
        return sum(e - s for s, e in pieces)
        """,
        # numpy cumulative sums over moments
        """
        import time, gc
        from itertools import pairwise
        import numpy as np

        moments = np.array(sorted({x for s in [*compute, *communication] for x in s}))
        if len(moments) < 2:
            return 0.0
        def cover(spans):
            d = np.zeros(len(moments), dtype=int)
            for s, e in spans:
                d[np.searchsorted(moments, s)] += 1
                d[np.searchsorted(moments, e)] -= 1
            return d.cumsum()[:-1] > 0
        return float(np.diff(moments)[cover(communication) & ~cover(compute)].sum())
        """,
    ],
}
