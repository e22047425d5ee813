"""Lesson 05, sync_gradients: a score that counts every item once, and a loss that counts every token alike."""

import functools
import math

import torch
import torch.distributed as dist

from scratch_ddp.course.attempt import in_short
from scratch_ddp.course.exercise import Exercise
from scratch_ddp.course.inputs.one_process import tried_in_worlds
from scratch_ddp.course.trial import Trial
from scratch_ddp.instruments.traffic import ring_bytes

NUMBER = 8  # bytes of one int64 or float64
MANY = 10  # the last world but one of accuracy_once: there are many hits on each of two ranks


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
    something else and carry a graph; `counts` (bool, same shape) is False at padding, which may be
    anywhere and have NaN or inf as its loss. The mean of the parts over the ranks is the mean over
    all ranks' tokens (at least one), right to six digits. Of the losses, only this rank's own enter
    its part, with any counted NaN or inf. A rank without tokens can call backward, too.
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
    numbers = (3 * n, 3 * n + 1, 4 * n - 1, 1, drawn)
    cases = {}
    for items in numbers if trial.on_all_ranks else numbers[1:3]:
        first = (items - 1) % 3 if items == 4 * n - 1 else 0  # so that the last of 4n-1 is right
        right = (torch.arange(items, device=trial.device) % 3 == first) & (items > 1)
        case = f"{items} item{'s' if items > 1 else ''}{f', drawn with seed={trial.seed}' if items >= drawn else ''}"
        cases[case] = _hits(right, trial.rank, n), items, right
    called = trial.call_each({case: given[:2] for case, given in cases.items()})
    for (_, items, right), result in zip(cases.values(), called, strict=True):
        trial.value(*_rounded(result, right.sum().item() / items))
        trial.agreement(result)
        trial.cost(calls={"all_reduce": 1}, max_wire_bytes=ring_bytes("all_reduce", NUMBER, n, trial.rank))
    trial.end_if_wrong()
    if trial.on_all_ranks:
        _examine_accuracy_in_worlds(trial)


def _examine_accuracy_in_worlds(trial: Trial) -> None:
    """V and C with 1 to 9 ranks, and with 24 and more: few items and many, of which any share is right."""
    rights: dict[str, torch.Tensor] = {}

    def arguments(case: str, n: int, number: int) -> list[tuple]:
        generator = torch.Generator().manual_seed(trial.seed + number)
        share, size = torch.rand(2, generator=generator).tolist()
        items, share = (300_000, 0.9) if number == MANY else (1 + number if number < 5 else int(300_000**size), share)
        items += 2 * n * (number > MANY)
        rights[case] = torch.rand(items, generator=generator) < share
        rights[case][0], rights[case][-1] = True, items == 1 or number > MANY
        again = number % 2 > 0 or number > MANY or number == 4
        return [(_hits(rights[case], rank, n, again), items) for rank in range(n)]

    makers = {}
    for number in range(MANY + 2):
        case, n = f"items {number} drawn with seed {trial.seed}", 2 if number == MANY else 1 + (trial.seed + number) % 9
        n = 24 + trial.seed % 8 if number > MANY else max(n, 2) if number == 0 else n
        n = 4 if number == 4 else n  # 5 items: the number of ranks does not follow from 2 predictions
        makers[case] = functools.partial(arguments, case, n, number)
    for case, world in tried_in_worlds(trial, makers):
        right = rights[case]
        for rank, result in enumerate(world.results):
            what = f"{world.place} {len(right):,} item{'s' * (len(right) > 1)}: rank {rank}'s result"
            trial.value(*_rounded(result, right.sum().item() / len(right)), what)
        wire = ring_bytes("all_reduce", NUMBER, len(world.results), 0)
        trial.criterion("cost", world.over_budget({"all_reduce": 1}, wire), world.place)


def _hits(right: torch.Tensor, rank: int, n: int, again: bool = True) -> torch.Tensor:
    """Rank `rank`'s, a column of a table. again: what repeated predictions are; whoever counts them is wrong."""
    items = len(right)
    places = torch.arange(rank, -(-items // n) * n, n, device=right.device)
    hits = torch.where(places < items, right[places.clamp(max=items - 1)], again)
    return torch.stack([hits, ~hits], dim=1)[:, 0]


def examine_token_mean(trial: Trial) -> None:
    """V of the loss's mean over the ranks, and of this rank's gradient; C. Padding carries 1000, NaN or inf."""
    n, rank, device = trial.size, trial.rank, trial.device
    cases = {"4 tokens each": [4] * n, "a token more on each rank": list(range(1, n + 1))}
    if n > 1:
        cases["rank 0 has no tokens"] = [0, *range(2, n + 1)]
    cases["1 token in all"] = [0] * (n - 1) + [1]
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
    mine = {case: tuple(each.to(device) for each in everyones[rank]) for case, everyones in batches.items()}
    sources = {case: losses.clone().requires_grad_() for case, (losses, _) in mine.items()}
    called = trial.call_each({case: (sources[case] * 1, counts) for case, (_, counts) in mine.items()})
    for (case, (losses, counts)), result in zip(mine.items(), called, strict=True):
        total = sum(int(counts.sum()) for _, counts in batches[case])
        _judge_part(trial, result, sources[case], losses, counts, n / total)
        trial.cost(calls={"all_reduce": 1}, max_wire_bytes=ring_bytes("all_reduce", NUMBER, n, rank))
    trial.end_if_wrong()
    if trial.on_all_ranks:
        _examine_parts_in_worlds(trial)


def _judge_part(
    trial: Trial,
    result: object,
    source: torch.Tensor,
    losses: torch.Tensor,
    counts: torch.Tensor,
    factor: float,
    place: str = "",
) -> None:
    if source.grad is not None:
        trial.criterion("untouched", f"{place}backward was called: that is left to the caller")
    what, gradient = f"{place}this rank's loss", f"{place}the gradient of losses"
    trial.value(_plain(result), losses[counts].sum() * factor, what, tolerance=1e-6)
    try:
        found = _gradient(result, source)
    except RuntimeError as error:  # the graph is used up, or what it needs has changed
        trial.criterion("value", f"can't be computed: backward raised {in_short(error)}", gradient)
    else:
        trial.value(found, counts.to(losses.dtype) * factor, gradient, tolerance=1e-6)


def _examine_parts_in_worlds(trial: Trial) -> None:
    """V and C with 1 to 9 ranks: rows and tokens of any number and share, on some ranks none, of both dtypes."""
    batches: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    sources: dict[str, list[torch.Tensor]] = {}

    def arguments(case: str, number: int) -> list[tuple]:
        n, generator = 1 + (trial.seed + number) % 9, torch.Generator().manual_seed(trial.seed + number)
        n, dtype = (1 + n % 2, torch.float32) if number > 5 else (n, torch.float64 if number % 2 else torch.float32)
        shape = {6: (300, 300), 7: (30, 3000)}.get(number)
        batches[case] = [_sized(generator, dtype, shape) for _ in range(n)]
        batches[case][number % n][1][:1, :1] = True  # some rank has a token, and its loss may be anything that counts
        batches[case][number % n][0][:1, :1] = 1.5
        sources[case] = [losses.clone().requires_grad_() for losses, _ in batches[case]]
        return [(each * 1, counts) for each, (_, counts) in zip(sources[case], batches[case], strict=True)]

    cases = [f"batch {number} drawn with seed {trial.seed}" for number in range(8)]
    makers = {case: functools.partial(arguments, case, number) for number, case in enumerate(cases)}
    for case, world in tried_in_worlds(trial, makers):
        factor = len(world.results) / sum(int(counts.sum()) for _, counts in batches[case])
        for rank, (losses, counts) in enumerate(batches[case]):
            place = f"{world.place} rank {rank}: "
            _judge_part(trial, world.results[rank], sources[case][rank], losses, counts, factor, place)
        wire = ring_bytes("all_reduce", NUMBER, len(world.results), 0)
        trial.criterion("cost", world.over_budget({"all_reduce": 1}, wire), world.place)


def _sized(
    generator: torch.Generator, dtype: torch.dtype, shape: tuple[int, int] | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses and counts of 1 to 90,000 places, of which any share counts; NaN, inf and numbers at padding."""
    rows, tokens, share = torch.rand(3, generator=generator).tolist()
    shape = shape or (int(100**rows), int(100**tokens))
    counts = torch.rand(shape, generator=generator) < max(0.0, 1.5 * share - 0.25)
    padding = torch.tensor([torch.nan, torch.inf, -7.0])[torch.randint(0, 3, shape, generator=generator)]
    losses = torch.rand(shape, generator=generator, dtype=torch.float64).to(dtype) + 0.5
    return torch.where(counts, losses, padding.to(dtype)), counts


def _rounded(result: object, expected: float) -> tuple[object, float]:
    """Both to six digits: equal for whoever divides in float32, also where that is rounded the other way."""
    if type(result) is float and math.isclose(result, expected, rel_tol=1e-6):
        result = expected
    return (round(result, 6) if isinstance(result, float) else result), round(expected, 6)


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
