"""Lesson 05, sync_gradients: a score that counts every item once, and a loss that counts every token alike."""

import torch
import torch.distributed as dist

from scratch_ddp.course.exercise import Exercise
from scratch_ddp.course.trial import Trial
from scratch_ddp.instruments.traffic import ring_bytes

NUMBER = 8  # bytes of one int64 or float64


def accuracy_once(hits, items):
    """Return the accuracy over all items, each counted once: a number, the same on every rank.

    `hits` (a bool tensor, one for each prediction of this rank) are in the order of
    DistributedSampler: rank r of n predicted the places r, r + n, r + 2n, … of a list that begins
    with all `items` items (1 or more) and is filled up with some of them again until n divides
    its length. The first prediction of an item counts; another one of it may differ.
    The accuracy is a Python number, right to six digits.
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

    `losses` (float32 or float64, this rank's rows × tokens, maybe no rows) are computed from
    something else and carry a graph; `counts` (bool, same shape) is False at padding, which is
    anywhere and where a loss means nothing and may be NaN or inf. The mean of the parts over the
    ranks is the mean over all tokens of all ranks (one or more), right to six digits. A rank's
    part depends on its own tokens alone: a counted NaN or inf is seen there. A rank may have none.
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
    """V, A, C: an even share, padded ones, more ranks than items, many items; hits that are a column of a table."""
    n = trial.size
    drawn = int(torch.randint(5 * n, 50 * n, (), generator=trial.generator()))
    numbers = (3 * n, 3 * n + 1, 4 * n - 1, 1, drawn, 110_000 + drawn)
    for items in numbers if trial.on_all_ranks else numbers[1:3]:
        places = torch.arange(trial.rank, -(-items // n) * n, n, device=trial.device)
        right = (torch.arange(items, device=trial.device) % 3 == 0) & (items > 1)
        hits = right[places.clamp(max=items - 1)] | (places >= items)  # whoever counts a repeated one finds too many
        table = torch.stack([hits, ~hits], dim=1)
        case = f"{items} item{'s' if items > 1 else ''}{f', drawn with seed={trial.seed}' if items >= drawn else ''}"
        result = trial.call(table[:, 0], items, case=case)
        trial.value(_rounded(result), _rounded(right.sum().item() / items))
        trial.agreement(result)
        trial.cost(calls={"all_reduce": 1}, max_wire_bytes=ring_bytes("all_reduce", NUMBER, n, trial.rank))


def examine_token_mean(trial: Trial) -> None:
    """V of the loss's mean over the ranks, and of this rank's gradient; C. Padding carries 1000, NaN or inf."""
    n, rank, device = trial.size, trial.rank, trial.device
    cases = {"4 tokens each": [4] * n, "a token more on each rank": list(range(1, n + 1))}
    if n > 1:
        cases["rank 0 has no tokens"] = [0, *range(2, n + 1)]
    many = "rank 0 has no rows, the others 2,049 tokens each" if n > 1 else "2,049 tokens"
    cases[many] = [0] * (n > 1) + [2049] * max(1, n - 1)
    special = "rank 0 counts an inf, the last rank a NaN"
    cases[special] = [4] * n
    batches = {case: [_batch(length, other) for other, length in enumerate(of)] for case, of in cases.items()}
    batches[special][0][0][1, 0], batches[special][-1][0][0, 0] = torch.inf, torch.nan
    if n > 1:
        batches[many][0] = tuple(each[:0] for each in batches[many][0])
    generator = trial.generator()
    batches[f"padding anywhere, float64, drawn with seed={trial.seed}"] = [_drawn(generator) for _ in range(n)]
    if not trial.on_all_ranks:  # the others don't depend on the number of ranks
        batches = {
            case: of for case, of in batches.items() if case in ("a token more on each rank", "rank 0 has no tokens")
        }
    for case, everyones in batches.items():
        total = sum(int(counts.sum()) for _, counts in everyones)
        losses, counts = (each.to(device) for each in everyones[rank])
        source = losses.clone().requires_grad_()
        result = trial.call(source * 1, counts, case=case)
        if source.grad is not None:
            trial.criterion("untouched", "backward was called: that is left to the caller")
        trial.value(_plain(result), losses[counts].sum() * n / total, "this rank's loss", tolerance=1e-6)
        expected = counts.to(losses.dtype) * (n / total)
        trial.value(_gradient(result, source), expected, "the gradient of losses", tolerance=1e-6)
        trial.cost(calls={"all_reduce": 1}, max_wire_bytes=ring_bytes("all_reduce", NUMBER, n, rank))


def _rounded(result: object) -> object:
    """Equal for whoever divides in float32 and in float64."""
    return round(result, 6) if isinstance(result, float) else result


def _counts(tokens: int) -> torch.Tensor:
    """Two rows that share the tokens, with at least one place for padding; bool."""
    lengths = torch.tensor([[tokens - tokens // 2], [tokens // 2]])
    return torch.arange(max(4, tokens // 2 + 2)) < lengths


def _batch(tokens: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses and counts. NaN at padding where all is padding, or so much is not that 1000 would hardly be seen."""
    counts = _counts(tokens)
    return torch.where(counts, float(rank + 1), 1000.0 if 0 < tokens < 2049 else torch.nan), counts


def _drawn(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses with exact sums, some of them negative, 0 or large; transposed in memory, padding at any place."""
    counts = torch.rand(7, 5, generator=generator) < 0.6
    losses = torch.randint(-50, 300, counts.shape, generator=generator).double()
    losses[0, :2], counts[0, :2] = torch.tensor([0.0, 1000.0]), True
    padding = torch.tensor([torch.nan, torch.inf, -torch.inf]).repeat(12)[:35].view(7, 5)
    return torch.where(counts, losses, padding.double()).t(), counts.t()


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
