"""Lesson 05, sync_gradients: a score that counts every item once, and a loss that counts every token alike."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from scratch_ddp.course.exercise import At, Exercise


def accuracy_once(hits, items):
    """Return the accuracy over all items, each counted once: the same on every rank.

    `hits` (bool) says which predictions of this rank are right. Of n ranks, rank r has
    items r, r + n, r + 2n, …; DistributedSampler has then filled up the list with its
    first items until n divides its length. Cost: one all-reduce of a single number.
    """
    rank, n = dist.get_rank(), dist.get_world_size()
    # At which places of the whole list do this rank's predictions stand?
    # answer: begin
    places = rank + n * torch.arange(len(hits), device=hits.device)
    right = hits[places < items].sum()
    dist.all_reduce(right)
    return right.item() / items
    # answer: end


def _hits(at: At) -> Iterator[tuple[str, tuple]]:
    for items in (20 * at.n, 20 * at.n - 1, 19 * at.n + 1):
        generator = torch.Generator().manual_seed(items)
        hits = torch.rand(items, generator=generator) < 0.6
        hits[: at.n] = True  # those that are there twice
        hits[-at.n - 1 : -1] = False
        hits[-1] = True
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
    # answer: begin
    tokens = counts.sum()
    dist.all_reduce(tokens)
    return losses[counts].sum() * n / tokens
    # answer: end


def _tokens(at: At) -> Iterator[tuple[str, tuple]]:
    rows, length = 2 + at.rank, 6
    generator = torch.Generator().manual_seed(at.rank)
    losses = torch.rand(rows, length, generator=generator)
    padding = torch.arange(length) >= torch.randint(1, length + 1, (rows, 1), generator=generator)
    yield "rows of different lengths", (losses, ~padding)
    yield "padding on the left", (losses, padding.logical_not().flip(1))
    yield "rank 0 has padding only", (losses, ~padding & (at.rank > 0))
    yield "rank 0 has no rows", (losses[: rows * (at.rank > 0)], ~padding[: rows * (at.rank > 0)])


def _backward(answer: Callable, losses: torch.Tensor, counts: torch.Tensor) -> Iterator[tuple[str, str, Any]]:
    leaf = losses.clone().requires_grad_()
    part = answer(leaf * 1, counts)
    yield "value", "the part", part
    part.backward()
    yield "value", "the gradient of `losses`", leaf.grad


EXERCISES = (
    Exercise(accuracy_once, _hits, close=1e-6),
    Exercise(token_mean, _tokens, use=_backward, close=1e-6),
)
