"""`train`: the loop that all strategies share, the same for one process and for n ranks.

A plain model is trained by this process alone, a model in a strategy's wrapper by all ranks of its group.
"""

import contextlib
import functools
import random
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.common.accounting import set_up
from scratch_ddp.common.agreement import gather_rows
from scratch_ddp.common.extras import extra
from scratch_ddp.common.progress import shows_progress
from scratch_ddp.training.data import Batch, Batches
from scratch_ddp.training.evaluation import Score, evaluate

LossSum = Callable[[nn.Module, Batch], torch.Tensor]


def seed_everything(seed: int) -> None:
    """Seed Python's and torch's random numbers. Use the same seed on every rank before a model is built."""
    random.seed(seed)
    torch.manual_seed(seed)


def pair_loss_sum(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the sum of the cross-entropies of this rank's own rows: a scalar, at least float32. No communication."""
    logits = model(**batch.inputs).logits[: batch.count]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return nn.functional.cross_entropy(logits, batch.labels[: batch.count], reduction="sum")


def global_mean(total: torch.Tensor, count: float, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Scale a rank's sum over `count` tokens (or rows) so that the mean over the ranks is the mean over all tokens.

    In a mean of the ranks' own means, tokens on a rank with fewer of them would count more. Costs one all-reduce of one
    number.
    """
    everyones = torch.tensor(float(count), dtype=torch.float64, device=total.device)
    dist.all_reduce(everyones, group=group)
    return total * (dist.get_world_size(group) / everyones.item())


def windows(batches: Iterator[Batch], size: int) -> Iterator[list[Batch]]:
    """Group micro-batches into windows of `size`, one per optimizer step. The last one may be smaller."""
    window = []
    for batch in batches:
        window.append(batch)
        if len(window) == size:
            yield window
            window = []
    if window:
        yield window


def accumulate(model: nn.Module, window: list[Batch], loss_sum: LossSum, world_size: int) -> torch.Tensor:
    """Leave in `.grad` the gradient of the mean loss over all rows of the window on all ranks; return this rank's part.

    The mean of the returned parts over the ranks is that loss. Communication: one `sync_gradients()`, at the end.
    """
    sync_gradients = getattr(model, "sync_gradients", lambda: None)  # plain models and torch's DDP have none
    no_sync = getattr(model, "no_sync", contextlib.nullcontext)
    rows = sum(batch.global_count for batch in window)
    part = 0.0
    for i, batch in enumerate(window):
        last = i + 1 == len(window)
        with contextlib.nullcontext() if last else no_sync():
            loss = loss_sum(model, batch) * (world_size / rows)
            loss.backward()
            sync_gradients()
        part = part + loss.detach()
    return part


class History:
    """A run as one rank saw it. `losses` are its parts of each step's loss: their mean over the ranks is the loss."""

    def __init__(self, losses: Iterable[float] = (), epoch_losses: Iterable[float] = (), scores: Iterable[Score] = ()):
        self._losses, self._recent = list(losses), []
        self.epoch_losses = list(epoch_losses)  # mean loss of the epoch's steps, over all ranks
        self.scores = list(scores)
        self.dtype = torch.float64  # of the last loss

    @property
    def losses(self) -> list[float]:
        """This rank's part of each step's loss. To read them waits for a GPU."""
        if self._recent:
            self._losses += torch.stack(self._recent).tolist()
            self._recent.clear()
        return self._losses

    @property
    def steps(self) -> int:
        """How many steps there were."""
        return len(self._losses) + len(self._recent)

    def add(self, part: torch.Tensor) -> None:
        """Add this rank's part of a step's loss, without waiting for it."""
        self.dtype = part.dtype
        self._recent.append(part)

    def of_all_ranks(self, group: dist.ProcessGroup | None = None) -> torch.Tensor:
        """Return every rank's losses: float64 (steps, ranks). Costs one all-gather; nothing without a process group."""
        mine = torch.tensor(self.losses, dtype=torch.float64)
        return torch.stack(gather_rows(mine, group) if dist.is_initialized() else [mine], dim=1)


def train(
    model: nn.Module,
    batches: Batches,
    epochs: int = 1,
    lr: float = 1e-3,
    accumulation: int = 1,
    warmup: float = 0.1,
    weight_decay: float = 0.01,
    validation: Batches | None = None,
    loss_sum: LossSum = pair_loss_sum,
    optimizer: torch.optim.Optimizer | None = None,
    report: Callable[[str], None] | None = None,
    progress: bool | None = None,
    history: History | None = None,
    after_step: Callable[[list[Batch], History], None] | None = None,
) -> History:
    """Train with AdamW (or `optimizer`) and a learning rate that rises over `warmup` of the steps, then falls to zero.

    `batches` and `validation` must share their items over the same ranks as the model (`world_size` 1 for a plain
    model), or ValueError is raised. `accumulation` micro-batches make a step. After each epoch, `report` gets a line. A
    progress bar is shown on the first rank if `progress`, by default where stderr is a terminal. Returns this rank's
    history. With the `history` of an interrupted run, whose state model and optimizer have, training goes on where that
    one ended. `after_step` is called with the micro-batches of each step and the history so far.
    Communication: that of the strategy, and after each epoch one all-reduce of one number and an evaluation.
    """
    with extra("cells"):
        from tqdm import tqdm
    check_ranks(model, batches, validation)
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=weight_decay)
    history = history or History()
    per_epoch = -(-len(batches) // accumulation)
    steps, done = epochs * per_epoch, history.steps
    factor = functools.partial(warm_up_then_fall, steps=steps, warmup=warmup)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor, last_epoch=done - 1)
    with tqdm(total=steps, initial=done, unit="step", disable=not shows_progress(batches.rank, progress)) as bar:

        def step(window: list[Batch], part: torch.Tensor) -> None:
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            bar.update()
            history.add(part)
            if after_step:
                after_step(window, history)

        for epoch in range(len(history.epoch_losses), epochs):
            began = epoch * per_epoch
            train_epoch(model, batches, epoch, accumulation, loss_sum, step, first=history.steps - began)
            mean = torch.tensor(history.losses[began:], dtype=history.dtype).mean()
            history.epoch_losses.append(mean_over_ranks(mean, model, batches.world_size))
            line = f"epoch {epoch + 1}: loss {history.epoch_losses[-1]:.4f}"
            if validation:
                history.scores.append(evaluate(model, validation))
                line += f", validation {history.scores[-1]}"
            if report:
                report(line)
    return history


def train_epoch(
    model: nn.Module,
    batches: Batches,
    epoch: int,
    accumulation: int,
    loss_sum: LossSum,
    step: Callable[[list[Batch], torch.Tensor], None],
    first: int = 0,
) -> None:
    """Train on all items, or from step `first` on. `step` gets each window and this rank's part of its loss."""
    device = next(model.parameters()).device
    model.train()
    for window in windows((batch.to(device) for batch in batches.epoch(epoch, first * accumulation)), accumulation):
        step(window, accumulate(model, window, loss_sum, batches.world_size))


def mean_over_ranks(value: torch.Tensor, model: nn.Module, world_size: int) -> float:
    """The mean of a scalar over the ranks that train the model. Costs one all-reduce of one number, if not alone."""
    value = value.double() / world_size
    if world_size > 1:
        with set_up():
            dist.all_reduce(value, group=getattr(model, "group", None))
    return value.item()


def check_ranks(model: nn.Module, *shares: Batches | None) -> None:
    """Raise ValueError unless the items are shared over as many ranks as train the model."""
    world_size = getattr(model, "world_size", 1)
    if isinstance(model, nn.parallel.DistributedDataParallel):
        world_size = dist.get_world_size(model.process_group)
    for batches in filter(None, shares):
        if batches.world_size != world_size:
            raise ValueError(
                f"the items are shared over {batches.world_size} ranks, but {world_size} train the model: "
                "wrap the model, or build the batches with its rank and world_size"
            )


def warm_up_then_fall(step: int, steps: int, warmup: float) -> float:
    """The factor of the learning rate: linearly up over the first `warmup` of the steps, then linearly down to 0."""
    rising = max(1, round(warmup * steps))
    return min((step + 1) / rising, (steps - step) / max(1, steps - rising))
