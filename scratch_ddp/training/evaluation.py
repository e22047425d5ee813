"""`evaluate`: score a classifier on a split, with every item counted once for any number of ranks."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.common.accounting import set_up
from scratch_ddp.common.agreement import message_device
from scratch_ddp.training.data import Batches


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


def score(table: torch.Tensor) -> Score:
    """Compute the score from a table of counts, int64 (2, 2): table[label, prediction]."""
    (tn, fp), (fn, tp) = table.tolist()
    items = tn + fp + fn + tp
    return Score((tp + tn) / items, 2 * tp / max(1, 2 * tp + fp + fn), max(tp + fn, tn + fp) / items, items)


def evaluate(model: nn.Module, batches: Batches) -> Score:
    """Score the model on all items, and return the same score on every rank that shares them.

    The rank's share comes from `batches`; rows that fill in to keep ranks in step are not counted. Costs one all-reduce
    of four numbers if there is more than one rank. Raises RuntimeError if the counts don't add up to all items.
    """
    device = next(model.parameters()).device
    table = torch.zeros(2, 2, dtype=torch.int64)
    training = model.training
    model.eval()
    with torch.no_grad():
        for batch in batches.epoch():
            logits = model(**batch.to(device).inputs).logits[: batch.count]
            for label, prediction in zip(batch.labels[: batch.count], logits.argmax(-1).cpu(), strict=True):
                table[label, prediction] += 1
    model.train(training)
    if batches.world_size > 1:
        group = getattr(model, "group", None)
        table = table.to(message_device(group))
        with set_up():
            dist.all_reduce(table, group=group)
    if table.sum() != len(batches.items):
        raise RuntimeError(
            f"{int(table.sum())} predictions for {len(batches.items)} items: do all ranks share one split?"
        )
    return score(table)
