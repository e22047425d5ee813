"""Other right answers to the exercises of lesson 07."""

RIGHT_ANSWERS = {
    "time_calls": [
        # the first call stands before the loop, a list becomes a tensor at the end
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
        # times the first call, too, and cuts it off; the least of what is negative
        """
        looks = []
        for _ in range(repeats + 1):
            dist.barrier(async_op=True).wait()
            looks.append((clock(), operation(), clock()))
        mine = torch.tensor([a - b for a, _, b in looks], dtype=torch.double, device=device)
        dist.all_reduce(mine, dist.ReduceOp.MIN)
        times = (-mine).tolist()[1:]
        """,
    ],
    "forecast_step": [
        # two equations with two unknowns
        """
        sizes = torch.tensor([[1.0, size] for size in timed], dtype=torch.float64)
        alpha, beta = torch.linalg.solve(sizes, torch.tensor(list(timed.values()), dtype=torch.float64)).tolist()
        seconds = float(sum(alpha + beta * (2 - 2 / n) * each for each in gradients))
        """,
    ],
}
