"""Lesson 05, sync_gradients: a score that counts every item once, and a loss that counts every token alike."""

import torch
import torch.distributed as dist

from scratch_ddp.course.exercise import Exercise
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
    False at padding, where a loss means nothing and may be NaN. The mean of the parts over the
    ranks is the mean over all tokens of all ranks, and a rank's part depends on its own tokens
    alone. A rank may have no tokens.
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
    for items in (3 * n, 3 * n + 1, 4 * n - 1, 1, 900 * n + 1):
        length = -(-items // n) * n
        order = [place % items for place in range(length)]
        right = torch.tensor([item % 3 == 0 for item in range(items)], device=trial.device)
        hits = right[order[trial.rank :: n]]
        result = trial.call(hits, items, case=f"{items} items")
        trial.value(_rounded(result), _rounded(right.sum().item() / items))
        trial.agreement(result)
        trial.cost(calls={"all_reduce": 1}, max_wire_bytes=ring_bytes("all_reduce", NUMBER, n, trial.rank))


def examine_token_mean(trial: Trial) -> None:
    """V of the loss's mean over the ranks, and of this rank's gradient; C. Padding carries a loss of 1000, or NaN."""
    n, rank = trial.size, trial.rank
    cases = {"4 tokens each": [4] * n, "a token more on each rank": list(range(1, n + 1))}
    cases["2,049 tokens each"] = [2049] * n
    if n > 1:
        cases["rank 0 has no tokens"] = [0, *range(2, n + 1)]
    for case, lengths in cases.items():
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
    """Two rows that share the tokens, with at least one place for padding; bool."""
    lengths = torch.tensor([[tokens - tokens // 2], [tokens // 2]])
    return torch.arange(max(4, tokens // 2 + 2)) < lengths


def _losses(tokens: int, rank: int) -> torch.Tensor:
    """NaN at padding in the longer case, where 1000 would hardly be seen."""
    return torch.where(_counts(tokens), float(rank + 1), 1000.0 if tokens < 2049 else torch.nan)


def _plain(result: object) -> object:
    return result.detach() if isinstance(result, torch.Tensor) else result


def _gradient(result: object, losses: torch.Tensor) -> torch.Tensor | None:
    """Of the result with respect to the losses; None where there is no graph to go back through."""
    if not isinstance(result, torch.Tensor) or result.numel() != 1 or not result.requires_grad:
        return None
    return torch.autograd.grad(result, losses, allow_unused=True)[0]


ACCURACY_ONCE = Exercise(accuracy_once, examine_accuracy_once)
TOKEN_MEAN = Exercise(token_mean, examine_token_mean)
EXERCISES = (ACCURACY_ONCE, TOKEN_MEAN)
