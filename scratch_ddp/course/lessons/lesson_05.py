"""Lesson 05, sync_gradients: a score that counts every item once, and a loss that counts every token alike."""

import torch
import torch.distributed as dist

from scratch_ddp.course.exercise import Exercise, WrongAnswer
from scratch_ddp.course.trial import Trial
from scratch_ddp.instruments.traffic import ring_bytes

NUMBER = 8  # bytes of one int64 or float64


def accuracy_once(hits, items):
    """Return the accuracy over all items, each counted once: a float, the same on every rank.

    `hits` (bool, one for each prediction of this rank) are in the order of DistributedSampler:
    rank r of n predicted the places r, r + n, r + 2n, … of a list that begins with all `items`
    items and is filled up with some of them again until n divides its length.
    Cost: one all-reduce of a single number.
    """
    rank, n = dist.get_rank(), dist.get_world_size()
    # At which places of the whole list do this rank's predictions stand?
    # answer: begin
    places = rank + n * torch.arange(len(hits), device=hits.device)
    right = hits[places < items].sum()
    dist.all_reduce(right)
    return right.item() / items
    # answer: end


def token_mean(losses, counts):
    """Return this rank's part of the loss, a scalar to call backward on before `sync_gradients`.

    `losses` (float, this rank's rows × tokens) carry a graph; `counts` (bool, same shape) is
    False at padding, where a loss means nothing. The mean of the parts over the ranks is the
    mean over all tokens of all ranks, and a rank's part depends on its own tokens alone.
    A rank may have no tokens.
    Cost: one all-reduce of a single number.
    """
    n = dist.get_world_size()
    # sync_gradients will divide by n. What should it have divided by?
    # answer: begin
    tokens = counts.sum()
    dist.all_reduce(tokens)
    return losses[counts].sum() * n / tokens
    # answer: end


def examine_accuracy_once(trial: Trial) -> None:
    """V, A, C: an even share, a padded one, one with more ranks than items; right answers in various places."""
    n = trial.size
    for items in (3 * n, 3 * n + 1, 4 * n - 1, 1):
        length = -(-items // n) * n
        order = [place % items for place in range(length)]
        right = torch.tensor([item % 3 == 0 for item in range(items)], device=trial.device)
        hits = right[order[trial.rank :: n]]
        result = trial.call(hits, items, case=f"{items} items")
        trial.value(_rounded(result), _rounded(right.sum().item() / items))
        trial.agreement(result)
        trial.cost(calls={"all_reduce": 1}, max_wire_bytes=ring_bytes("all_reduce", NUMBER, n, trial.rank))


def examine_token_mean(trial: Trial) -> None:
    """V of the loss's mean over the ranks, and of this rank's gradient; C. Padding carries a loss of 1000."""
    n, rank = trial.size, trial.rank
    for case, lengths in (
        ("4 tokens each", [4] * n),
        ("a token more on each rank", list(range(1, n + 1))),
        ("rank 0 has no tokens", [0, *range(2, n + 1)]),
    ):
        tokens, total = lengths[rank], sum(lengths)
        everyones = [_losses(length, other).to(trial.device) for other, length in enumerate(lengths)]
        losses, counts = everyones[rank].clone().requires_grad_(), _counts(tokens).to(trial.device)
        result = trial.call(losses, counts, case=case)
        expected = everyones[rank][counts].sum() * n / total
        trial.value(_plain(result), expected, "this rank's loss", tolerance=1e-6)
        trial.value(_gradient(result, losses), counts * (n / total), "the gradient of losses", tolerance=1e-6)
        trial.cost(calls={"all_reduce": 1}, max_wire_bytes=ring_bytes("all_reduce", NUMBER, n, rank))


def _rounded(result: object) -> object:
    """Equal for whoever divides in float32 and in float64."""
    return round(result, 6) if isinstance(result, float) else result


def _counts(tokens: int) -> torch.Tensor:
    """Two rows that share the tokens; bool (2, 4)."""
    lengths = torch.tensor([[tokens - tokens // 2], [tokens // 2]])
    return torch.arange(4) < lengths


def _losses(tokens: int, rank: int) -> torch.Tensor:
    return torch.where(_counts(tokens), float(rank + 1), 1000.0)


def _plain(result: object) -> object:
    return result.detach() if isinstance(result, torch.Tensor) else result


def _gradient(result: object, losses: torch.Tensor) -> torch.Tensor | None:
    """Of the result with respect to the losses; None where there is no graph to go back through."""
    if not isinstance(result, torch.Tensor) or result.numel() != 1 or not result.requires_grad:
        return None
    return torch.autograd.grad(result, losses, allow_unused=True)[0]


ACCURACY_ONCE = Exercise(
    accuracy_once,
    examine_accuracy_once,
    wrong=(
        WrongAnswer(
            "counts what the sampler has filled up with",
            fails="value",
            says="13 items: the result is 0.375, should be 0.384615.",
            edits={
                "hits[places < items].sum()": "hits.sum()",
                "right.item() / items": "right.item() / (n * len(hits))",
            },
        ),
        WrongAnswer(
            "divides by the items, but still counts hits twice",
            fails="value",
            says="13 items: the result is 0.461538, should be 0.384615.",
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
            says="13 items: the result is 0.461538, should be 0.384615.",
            edits={
                "rank + n * torch.arange(len(hits), device=hits.device)": "rank * len(hits) + torch.arange(len(hits))"
            },
        ),
        WrongAnswer(
            "each rank's own accuracy",
            fails="agreement",
            says="13 items: Ranks 2 and 3 hold other bits than rank 0.",
            body="return hits.double().mean().item()",
            also=("value",),
        ),
        WrongAnswer(
            "reduces to rank 0, and reads the sum everywhere",
            fails="agreement",
            says="12 items: Ranks 1, 2 and 3 hold other bits than rank 0.",
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
    ),
)
TOKEN_MEAN = Exercise(
    token_mean,
    examine_token_mean,
    wrong=(
        WrongAnswer(
            "the mean over this rank's own tokens: a mean of means",
            fails="value",
            says="a token more on each rank: this rank's loss is [1], should be [0.4]",
            body="return losses[counts].mean()",
        ),
        WrongAnswer(
            "forgets that sync_gradients divides once more",
            fails="value",
            says="Rank 0, 4 tokens each: this rank's loss is [0.25], should be [1].",
            edits={" * n / tokens": " / tokens"},
        ),
        WrongAnswer(
            "counts the padding",
            fails="value",
            says="4 tokens each: this rank's loss is [1001], should be [1].",
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
            says="4 tokens each: this rank's loss is [2.5], should be [1].",
            body="""
                both = torch.stack([losses[counts].sum().detach(), counts.sum()])
                dist.all_reduce(both)
                return both[0] / both[1]
            """,
        ),
        WrongAnswer(
            "a rank without tokens returns early",
            fails="runs",
            says="did not come back",
            edits={
                "tokens = counts.sum()": "tokens = counts.sum()\n    if tokens == 0:\n        return losses.sum() * 0"
            },
        ),
    ),
)
EXERCISES = (ACCURACY_ONCE, TOKEN_MEAN)
