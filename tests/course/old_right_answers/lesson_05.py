"""Unusual right answers of lesson 05: edits of the reference, other bodies, or whole cells."""

RIGHT_ANSWERS = {
    "accuracy_once": [
        {
            "dist.all_reduce(right)": "future = dist.all_reduce(right, async_op=True).get_future()\n"
            "    future.then(lambda done: done.value()).wait()"
        },
        {"return right.item() / items": "return (right / items).item()"},
        {"hits[places < items].sum()": "(hits & (places < items)).count_nonzero()"},
        {"hits[places < items].sum()": "hits[: (items - rank + n - 1) // n].sum()"},
        {"hits[places < items].sum()": "torch.tensor(sum(hits[places < items].tolist()))"},
        # adds up shares in float32, Fraction at the end
        """
        from fractions import Fraction
        rank, n = dist.get_rank(), dist.get_world_size()
        count = sum(hit for place, hit in zip(range(rank, items, n), hits.tolist()))
        share = torch.tensor([float(Fraction(count, items))], dtype=torch.float64)
        dist.all_reduce(share)
        return float(share[0])
        """,
    ],
    "token_mean": [
        {"losses[counts].sum() * n / tokens": "torch.where(counts, losses, 0).sum() / tokens * n"},
        {"losses[counts].sum() * n / tokens": "losses.masked_fill(~counts, 0).sum() * (n / tokens.item())"},
        {"losses[counts].sum() * n / tokens": "losses.masked_select(counts).sum() / (tokens / n)"},
        {"tokens = counts.sum()": "tokens = counts.sum().float()"},
        # masked_select, row by row weights
        """
        n = dist.get_world_size()
        total = torch.count_nonzero(counts)
        dist.all_reduce(total)
        weights = torch.full_like(losses, n / total.item())
        return (losses.masked_select(counts) * weights.masked_select(counts)).sum()
        """,
    ],
}
