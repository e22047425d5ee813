"""Wrong answers to the exercises of lesson 05."""

from tests.course.answers import WrongAnswer

WRONG_ANSWERS = {
    "accuracy_once": (
        WrongAnswer(
            "counts what the sampler has filled up with",
            "value",
            "items: the result is 0",
            {"hits[places < items].sum()": "hits.sum()", "right.item() / items": "right.item() / (n * len(hits))"},
        ),
        WrongAnswer(
            "the mean of the ranks' accuracies",
            "value",
            "items: the result is 0",
            {
                "hits[places < items].sum()": "hits[places < items].double().mean()",
                "right.item() / items": "right.item() / n",
            },
        ),
        WrongAnswer(
            "takes the shards for contiguous ones",
            "value",
            "items: the result is",
            {"rank + n * torch.arange(len(hits), device=hits.device)": "rank * len(hits) + torch.arange(len(hits))"},
            n=(4,),
        ),
        WrongAnswer(
            "each rank's own accuracy", "value", "items: the result is 0", body="return hits.double().mean().item()"
        ),
        WrongAnswer(
            "reduces to rank 0, and reads the sum everywhere",
            "value",
            "items: the result is 0.3",
            {"dist.all_reduce(right)": "dist.reduce(right, 0)"},
        ),
        WrongAnswer(
            "collects everybody's predictions",
            "cost",
            "0 bytes from one rank, budget",
            body="""
            everyones = [torch.empty_like(hits) for _ in range(n)]
            dist.all_gather(everyones, hits)
            in_order = torch.stack(everyones, dim=1).flatten()
            return in_order[:items].sum().item() / items
            """,
        ),
    ),
    "token_mean": (
        WrongAnswer(
            "the mean over this rank's own tokens: a mean of means",
            "value",
            "rows of different lengths: the part is",
            body="return losses[counts].mean()",
        ),
        WrongAnswer(
            "forgets that sync_gradients divides once more",
            "value",
            "rows of different lengths: the part is 0",
            {" * n / tokens": " / tokens"},
        ),
        WrongAnswer(
            "counts the padding",
            "value",
            "rows of different lengths: the part is 0",
            {"losses[counts].sum()": "losses.sum()"},
        ),
        WrongAnswer(
            "returns a number, which has no graph",
            "runs",
            "Rank 0 raised AttributeError: 'float' object has no attribute 'backward'",
            {"losses[counts].sum() * n / tokens": "losses[counts].sum().item() * n / tokens.item()"},
        ),
        WrongAnswer(
            "a rank without tokens returns early",
            "runs",
            "Rank 1 called 1 collective, rank 0 none",
            {"tokens = counts.sum()": ("tokens = counts.sum()\n    if tokens == 0:\n        return losses.sum() * 0")},
        ),
    ),
}
