"""Unusual right answers of lesson 07: edits of the reference, other bodies, or whole cells."""

RIGHT_ANSWERS = {
    "time_calls": [
        """
        operation()
        times = []
        for _ in range(repeats):
            dist.barrier()
            began = clock()
            operation()
            times.append(clock() - began)
        everyones = torch.tensor(times, dtype=torch.float64).to(device)
        dist.all_reduce(everyones, op=dist.ReduceOp.MAX)
        times = everyones.cpu().tolist()
        """,
        # a helper, min of negatives, async barrier
        """
        def one():
            dist.barrier(async_op=True).wait()
            began = clock()
            operation()
            ended = clock()
            return began - ended
        operation()
        times = torch.tensor([one() for _ in range(repeats)], dtype=torch.double).to(device)
        dist.all_reduce(times, op=dist.ReduceOp.MIN)
        return [-each for each in times.cpu().numpy().tolist()]
        """,
        # the warm-up is call 0 of the loop; perf via try/finally
        """
        times = []
        for call in range(repeats + 1):
            dist.barrier()
            start = clock()
            try:
                operation()
            finally:
                times.append(clock() - start)
        everyones = torch.tensor(times[1:], dtype=torch.float64, device=device)
        dist.all_reduce(everyones, op=dist.ReduceOp.MAX)
        return everyones.tolist()
        """,
        # a class that is a context manager
        """
        import time, gc
        from itertools import pairwise
        import torch
        import torch.distributed as dist

        class Watch:
            def __init__(self, clock):
                self.clock = clock
            def __enter__(self):
                self.began = self.clock()
                return self
            def __exit__(self, *_):
                self.took = self.clock() - self.began
        def time_calls(operation, repeats, clock, device):
            operation()
            times = []
            while len(times) < repeats:
                dist.barrier()
                with Watch(clock) as watch:
                    operation()
                times.append(watch.took)
            times = torch.tensor(times, dtype=torch.float64, device=device)
            dist.all_reduce(times, op=dist.ReduceOp.MAX)
            return [float(each) for each in times]
        """,
        # times the first call, too, and cuts it off
        """
        import time

        looks = []
        for _ in range(repeats + 1):
            dist.barrier()
            looks.append((clock(), operation(), clock()))
        mine = torch.tensor([b - a for a, _, b in looks], dtype=torch.double, device=device)
        dist.all_reduce(mine, dist.ReduceOp.MAX)
        return mine.tolist()[1:]
        """,
    ],
    "forecast_step": [
        """
        sizes = sorted(timed)
        beta = (timed[sizes[1]] - timed[sizes[0]]) / (sizes[1] - sizes[0])
        alpha = timed[sizes[0]] - beta * sizes[0]
        seconds = 0.0
        for size in gradients:
            seconds += alpha + beta * size * 2 * (n - 1) / n
        """,
        # exact fractions
        """
        (small, small_seconds), (large, large_seconds) = sorted(timed.items())
        beta = (large_seconds - small_seconds) / (large - small)
        alpha = small_seconds - beta * small
        sent = 2 * (n - 1) / n * sum(gradients)
        from fractions import Fraction as F
        b = (F(large_seconds) - F(small_seconds)) / (large - small)
        a = F(small_seconds) - b * small
        return float(a * len(gradients) + b * F(2 * (n - 1), n) * sum(gradients))
        seconds = alpha * len(gradients) + beta * sent
        return seconds
        """,
        # least squares in numpy
        """
        (small, small_seconds), (large, large_seconds) = sorted(timed.items())
        import numpy as np
        beta, alpha = np.linalg.solve([[small, 1.0], [large, 1.0]], [small_seconds, large_seconds])
        sent = 2 * (n - 1) / n * sum(gradients)
        seconds = alpha * len(gradients) + beta * sent
        return float(seconds)
        """,
        # from the larger one
        """
        (small, small_seconds), (large, large_seconds) = sorted(timed.items())
        beta = (large_seconds - small_seconds) / (large - small)
        alpha = large_seconds - beta * large
        sent = 2 * (n - 1) / n * sum(gradients)
        seconds = alpha * len(gradients) + beta * sent
        return seconds
        """,
        # Cramer's rule with torch in float64
        """
        import time

        sizes = torch.tensor([[1.0, s] for s in timed], dtype=torch.float64)
        alpha, beta = torch.linalg.solve(sizes, torch.tensor(list(timed.values()), dtype=torch.float64)).tolist()
        share = 2 - 2 / n
        return float(sum(alpha + beta * share * each for each in gradients))
        """,
    ],
}
