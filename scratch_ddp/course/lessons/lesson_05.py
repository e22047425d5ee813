"""Lesson 05, sync_gradients: a score that counts every item once, and a loss that counts every token alike."""

import torch
import torch.distributed as dist

from scratch_ddp.course.exercise import Exercise
from scratch_ddp.course.lessons import with_backward


def accuracy_once(hits, items):
    """Return the accuracy over all items, each counted once: the same on every rank.

    `hits` (bool) says which predictions of this rank are right. Of n ranks, rank r has
    items r, r + n, r + 2n, …; DistributedSampler has then filled up the list with its
    first items until n divides its length. Cost: one all-reduce of a single number.
    """
    rank, n = dist.get_rank(), dist.get_world_size()
    # At which places of the whole list do this rank's predictions stand?
    places = rank + n * torch.arange(len(hits), device=hits.device)
    right = hits[places < items].sum()
    dist.all_reduce(right)
    return right.item() / items


def _hits(at):
    for items in (20 * at.n, 20 * at.n - 1, 19 * at.n + 1):
        hits = torch.rand(items, generator=torch.Generator().manual_seed(items)) < 0.6
        hits[: at.n], hits[-at.n : -1], hits[-1] = True, False, True  # the first are there twice
        padded = torch.cat([hits, hits[: -items % at.n]])
        yield f"{items} items", (padded[at.rank :: at.n].clone(), items)


def token_mean(losses, counts):
    """Return this rank's part of the loss, to call backward on before `sync_gradients`.

    `losses` (rows × tokens) carry a graph; `counts` (same shape) is False at padding.
    The mean of the parts over the ranks is to be the mean over all ranks' tokens.
    Without tokens a rank calls backward, too.
    Cost: one all-reduce of a single number.
    """
    n = dist.get_world_size()
    # sync_gradients will divide by n. What should it have divided by?
    tokens = counts.sum()
    dist.all_reduce(tokens)
    return losses[counts].sum() * n / tokens


def _tokens(at):
    rows = 2 + at.rank
    losses, counts = torch.rand(rows, 6), torch.arange(6) < 5 - torch.arange(rows)[:, None]
    yield "rows of different lengths", (losses, counts)
    yield "rank 0 has padding only", (losses, counts & (at.rank > 0))
    yield "rank 0 has no rows", (losses[: rows * at.rank], counts[: rows * at.rank])


EXERCISES = (Exercise(accuracy_once, _hits, close=1e-6), Exercise(token_mean, _tokens, use=with_backward, close=1e-6))
