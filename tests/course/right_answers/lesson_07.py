"""Other right answers to the exercises of lesson 07."""

RIGHT_ANSWERS = {
    "time_calls": [
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
}
