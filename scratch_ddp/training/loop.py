"""`train` and `evaluate`: the loop that all strategies share, the same for one process and for n ranks.

A plain model is trained by this process alone, a model in a strategy's wrapper by all ranks of its group.
"""

import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm

from scratch_ddp.common.accounting import set_up
from scratch_ddp.common.agreement import message_device
from scratch_ddp.training.data import Batch, Batches

WARMUP = 0.1  # of the steps


@dataclass(frozen=True)
class Score:
    """Accuracy, F1 of class 1 (2·TP / (2·TP + FP + FN), 0 without any TP), and the share of the majority class."""

    accuracy: float
    f1: float
    majority: float
    items: int

    def __str__(self) -> str:
        of = f"{self.items} items, majority class {self.majority:.3f}"
        return f"accuracy {self.accuracy:.3f}, F1 {self.f1:.3f} ({of})"


@dataclass
class History:
    """What came of a run so far, the same on every rank."""

    losses: list[float] = field(default_factory=list)  # of each step: the mean over the rows of its global batch
    scores: list[Score] = field(default_factory=list)  # after each epoch, where there is validation


def train(
    model: nn.Module,
    batches: Batches,
    epochs: int = 1,
    lr: float = 1e-3,
    validation: Batches | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    report: Callable[[str], None] | None = None,
    history: History | None = None,
    after_step: Callable[[Batch, History], None] | None = None,
) -> History:
    """Train with AdamW (or `optimizer`) and a learning rate that rises over a tenth of the steps, then falls to zero.

    `batches` and `validation` share their items over the same ranks as the model (`world_size` 1 for a plain model);
    if `batches` does not, ValueError is raised. After each epoch, `report` gets a line. With the `history` of an
    interrupted run, whose state model and optimizer have, training goes on where that one ended; an epoch that it had
    completed is reported again. `after_step` is called with each step's batch and the history. Communication: that of
    the strategy, in each step one all-reduce of one number, and after each epoch an evaluation.
    """
    is_torchs = isinstance(model, nn.parallel.DistributedDataParallel)
    ranks = dist.get_world_size(model.process_group) if is_torchs else getattr(model, "world_size", 1)
    if batches.world_size != ranks:
        raise ValueError(
            f"the items are shared over {batches.world_size} ranks, but {ranks} train the model: "
            "wrap the model, or build the batches with its rank and world_size"
        )
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
    history = history or History()
    steps, done = epochs * len(batches), len(history.losses)
    schedule = LambdaLR(optimizer, lambda step: warm_up_then_fall(step, steps), last_epoch=done - 1)
    device = next(model.parameters()).device
    # Unless the variable says so (0, 1; `lab` sets it to 1), tqdm looks whether this is a terminal: None.
    hidden = {"0": True, "1": False}.get(os.environ.get("SCRATCH_DDP_PROGRESS"))
    with tqdm(total=steps, initial=done, unit="step", disable=batches.rank > 0 or hidden) as bar:
        for epoch in range(max(0, done - 1) // len(batches), epochs):
            model.train()
            began = epoch * len(batches)
            for batch in batches.epoch(epoch, len(history.losses) - began):
                part = backward(model, batch.to(device), ranks).cpu().double()  # not every GPU has float64
                history.losses.append(_sum_over_ranks(part, model, ranks).item() / ranks)
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
                bar.update()
                if after_step:
                    after_step(batch, history)
            line = f"epoch {epoch + 1}: loss {statistics.fmean(history.losses[began:]):.4f}"
            if validation:
                history.scores[epoch:] = [evaluate(model, validation)]
                line += f", validation {history.scores[-1]}"
            if report:
                report(line)
    return history


def warm_up_then_fall(step: int, steps: int) -> float:
    """The factor of the learning rate: linearly up over the first WARMUP of the steps, then linearly down to 0."""
    rising = max(1, round(WARMUP * steps))
    return min((step + 1) / rising, (steps - step) / max(1, steps - rising))


def backward(model: nn.Module, batch: Batch, world_size: int) -> torch.Tensor:
    """Leave in `.grad` the gradient of the mean loss over the rows of the batch on all ranks; return this rank's part.

    The mean of the returned parts over the ranks is that loss. Communication: one `sync_gradients()`.
    """
    logits = model(**batch.inputs).logits[: batch.count]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    losses = nn.functional.cross_entropy(logits, batch.labels[: batch.count], reduction="sum")
    loss = losses * (world_size / batch.global_count)
    loss.backward()
    getattr(model, "sync_gradients", lambda: None)()  # plain models and torch's DDP have none
    return loss.detach()


def evaluate(model: nn.Module, batches: Batches) -> Score:
    """Score the model on all items of `batches`, and return the same score on every rank that shares them.

    Costs one all-reduce of four numbers if there is more than one rank.
    """
    device = next(model.parameters()).device
    table = torch.zeros(2, 2, dtype=torch.int64)
    training = model.training
    model.eval()
    with torch.no_grad():
        for batch in batches.epoch():
            logits = model(**batch.to(device).inputs).logits[: batch.count]
            pairs = 2 * batch.labels[: batch.count] + logits.argmax(-1).cpu()
            table += torch.bincount(pairs, minlength=4).view(2, 2)
    model.train(training)
    return score(_sum_over_ranks(table, model, batches.world_size))


def score(table: torch.Tensor) -> Score:
    """Compute the score from a table of counts, int64 (2, 2): table[label, prediction]."""
    (tn, fp), (fn, tp) = table.tolist()
    items = tn + fp + fn + tp
    return Score((tp + tn) / items, 2 * tp / max(1, 2 * tp + fp + fn), max(tp + fn, tn + fp) / items, items)


def _sum_over_ranks(numbers: torch.Tensor, model: nn.Module, world_size: int) -> torch.Tensor:
    """The sum of a small tensor over the ranks that train the model. Costs one all-reduce, if not alone."""
    if world_size > 1:
        group = getattr(model, "process_group", None) or getattr(model, "group", None)  # torch's class; ours
        numbers = numbers.to(message_device(group))
        with set_up():
            dist.all_reduce(numbers, group=group)
    return numbers
