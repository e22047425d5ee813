"""Wrong answers to the exercises of lesson 05."""

from tests.course.wrong_answer import WrongAnswer

WRONG_ANSWERS = {
    "accuracy_once": (
        WrongAnswer(
            "takes the number of ranks from the number of predictions",
            fails="value",
            says="if there were 4 ranks, items 4 drawn with seed 1: 5 items: rank 0's result is ",
            edits={"rank + n * torch": "rank + -(-items // len(hits)) * torch"},
        ),
        WrongAnswer(
            "counts what the sampler has filled up with",
            fails="value",
            says="13 items: the result is 0.5, should be 0.384615.",
            edits={
                "hits[places < items].sum()": "hits.sum()",
                "right.item() / items": "right.item() / (n * len(hits))",
            },
        ),
        WrongAnswer(
            "divides by the items, but still counts hits twice",
            fails="value",
            says="13 items: the result is 0.615385, should be 0.384615.",
            edits={"hits[places < items].sum()": "hits.sum()"},
        ),
        WrongAnswer(
            "always leaves out the last prediction",
            fails="value",
            says="12 items: the result is 0.25, should be 0.333333.",
            edits={"hits[places < items]": "hits[:-1]"},
        ),
        WrongAnswer(
            "the mean of the ranks' accuracies",
            fails="value",
            says="13 items: the result is 0.375, should be 0.384615.",
            edits={
                "hits[places < items].sum()": "hits[places < items].double().mean()",
                "right.item() / items": "right.item() / n",
            },
        ),
        WrongAnswer(
            "takes the shards for contiguous ones",
            fails="value",
            says="13 items: the result is 0.538462, should be 0.384615.",
            edits={
                "rank + n * torch.arange(len(hits), device=hits.device)": "rank * len(hits) + torch.arange(len(hits))"
            },
        ),
        WrongAnswer(
            "each rank's own accuracy",
            fails="agreement",
            says="15 items: Ranks 2 and 3 have different bits from rank 0.",
            body="return hits.double().mean().item()",
            also=("value",),
        ),
        WrongAnswer(
            "reduces to rank 0, and reads the sum everywhere",
            fails="agreement",
            says="12 items: Ranks 1, 2 and 3 have different bits from rank 0.",
            edits={"dist.all_reduce(right)": "dist.reduce(right, 0)"},
            also=("value", "cost"),
        ),
        WrongAnswer(
            "collects everybody's predictions",
            fails="cost",
            says="calls all_gather",
            body="""
                everyones = [torch.empty_like(hits) for _ in range(n)]
                dist.all_gather(everyones, hits)
                in_order = torch.stack(everyones, dim=1).flatten()
                return in_order[:items].sum().item() / items
            """,
        ),
        WrongAnswer(
            "leaves another default dtype behind",
            fails="untouched",
            says="leaves torch.float64 as the default dtype",
            edits={
                "    dist.all_reduce(right)": "    torch.set_default_dtype(torch.float64)\n    dist.all_reduce(right)"
            },
        ),
        WrongAnswer(
            "returns a number of numpy's",
            fails="value",
            says="12 items: the result is a numpy.float64, should be a Python float",
            edits={"return right.item()": "import numpy\n    return numpy.float64(right.item())"},
        ),
        WrongAnswer(
            "leaves out the first prediction, not the repeated one",
            fails="value",
            says="13 items: the result is",
            edits={
                "hits[places < items].sum()": "(hits[1:] if rank < n * len(hits) - items else hits).sum()",
            },
        ),
        WrongAnswer(
            "with one item, every rank answers from its own prediction",
            fails="value",
            says="1 item: the result is 1.0, should be 0.0",
            edits={"right.item() / items": "right.item() / items if items > 1 or rank == 0 else float(hits[0])"},
            also=("agreement",),
        ),
        WrongAnswer(
            "counts places in two bytes",
            fails="value",
            says="drawn with seed",
            edits={"    right = hits": "    places = places.short()\n    right = hits"},
        ),
        WrongAnswer(
            "reads the memory behind a column",
            fails="value",
            says="12 items: the result is",
            edits={"right = hits[": "right = torch.as_strided(hits, hits.shape, (1,))["},
        ),
        WrongAnswer(
            "counts hits in one byte",
            fails="value",
            says="drawn with seed",
            edits={"hits[places < items].sum()": "hits[places < items].sum().to(torch.uint8)"},
        ),
    ),
    "token_mean": (
        WrongAnswer(
            "hides a NaN that counts",
            fails="value",
            says="rank 0 counts an inf, the last rank a NaN: this rank's loss is",
            edits={"losses[counts].sum()": "(losses.nan_to_num(0, 0, 0) * counts).sum()"},
        ),
        WrongAnswer(
            "takes padding to be on the right",
            fails="value",
            says="padding anywhere, float64, drawn with seed=",
            body="""
                lengths = counts.sum(1)
                dist.all_reduce(tokens := counts.sum())
                rows = [row[:length].sum() for row, length in zip(losses, lengths.tolist())]
                return sum(rows, losses[:0].sum()) * n / tokens
            """,
        ),
        WrongAnswer(
            "counts losses that are not 0",
            fails="value",
            says="padding anywhere, float64, drawn with seed=",
            edits={"tokens = counts.sum()": "tokens = torch.where(counts, losses, 0).count_nonzero()"},
        ),
        WrongAnswer(
            "changes the losses in place",
            fails="untouched",
            says="has other values than before: the answer must not change it",
            edits={"losses[counts].sum()": "losses.masked_fill_(~counts, 0).sum()"},
        ),
        WrongAnswer(
            "leaves anomaly detection on",
            fails="untouched",
            says="leaves anomaly detection switched on",
            edits={"    dist.all_reduce(": "    torch.autograd.set_detect_anomaly(True)\n    dist.all_reduce("},
        ),
        WrongAnswer(
            "a rank without rows has a loss without a graph",
            fails="value",
            says="rank 0 has no rows, the others 2,049 tokens each: the gradient of losses is None, should be a Tensor",
            body="""
                dist.all_reduce(tokens := counts.sum())
                return sum((row[each].sum() for row, each in zip(losses, counts)), torch.zeros(())) * n / tokens
            """,
        ),
        WrongAnswer(
            "the mean over this rank's own tokens: a mean of means",
            fails="value",
            says="a token more on each rank: this rank's loss is 1, should be 0.4",
            body="return losses[counts].mean()",
        ),
        WrongAnswer(
            "forgets that sync_gradients divides once more",
            fails="value",
            says="Rank 0, 4 tokens each: this rank's loss is 0.25, should be 1.",
            edits={" * n / tokens": " / tokens"},
        ),
        WrongAnswer(
            "counts the padding",
            fails="value",
            says="4 tokens each: this rank's loss is 1001, should be 1.",
            edits={"losses[counts].sum()": "losses.sum()"},
        ),
        WrongAnswer(
            "returns a number, which has no graph",
            fails="value",
            says="this rank's loss is a float, should be a Tensor",
            edits={"losses[counts].sum() * n / tokens": "losses[counts].sum().item() * n / tokens.item()"},
        ),
        WrongAnswer(
            "returns the mean over all tokens: the right number, but no way back to this rank's losses",
            fails="value",
            says="4 tokens each: this rank's loss is 2.5, should be 1.",
            body="""
                both = torch.stack([losses[counts].sum().detach(), counts.sum()])
                dist.all_reduce(both)
                return both[0] / both[1]
            """,
            also=("cost",),
        ),
        WrongAnswer(
            "a rank without tokens returns early",
            fails="runs",
            says="did not come back",
            edits={
                "tokens = counts.sum()": "tokens = counts.sum()\n    if tokens == 0:\n        return losses.sum() * 0"
            },
        ),
        WrongAnswer(
            "calls backward itself",
            fails="untouched",
            says="4 tokens each: backward was called",
            edits={
                "return losses[counts].sum() * n / tokens": "mine = losses[counts].sum() * n / tokens\n"
                "    mine.backward(retain_graph=True)\n    return mine"
            },
        ),
        WrongAnswer(
            "multiplies by zero what may be NaN",
            fails="value",
            says="rank 0 has no tokens: this rank's loss is nan, should be 0",
            edits={"losses[counts].sum()": "(losses * counts).sum()"},
        ),
        WrongAnswer(
            "leaves a counted inf out",
            fails="value",
            says="Rank 0, rank 0 counts an inf, the last rank a NaN: this rank's loss is 0.75, should be inf",
            edits={"losses[counts].sum()": "losses.masked_fill(~counts | losses.isinf(), 0).sum()"},
        ),
    ),
}
