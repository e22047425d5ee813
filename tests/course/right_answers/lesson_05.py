"""Other right answers to the exercises of lesson 05."""

RIGHT_ANSWERS = {
    "accuracy_once": [
        {"hits[places < items].sum()": "hits[: (items - rank + n - 1) // n].sum()"},
        # adds up shares
        """
        count = sum(hit for place, hit in zip(range(rank, items, n), hits.tolist()))
        share = torch.tensor([count / items], dtype=torch.float64)
        dist.all_reduce(share)
        return share.item()
        """,
    ],
    "token_mean": [
        {"losses[counts].sum() * n / tokens": "losses.masked_fill(~counts, 0).sum() * (n / tokens.item())"},
        # a weight for each token
        """
        total = torch.count_nonzero(counts)
        dist.all_reduce(total)
        weights = torch.full_like(losses, n / total.item())
        return (losses.masked_select(counts) * weights.masked_select(counts)).sum()
        """,
    ],
}
