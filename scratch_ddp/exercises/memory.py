"""Criterion M: how much an answer holds at once."""

from types import SimpleNamespace
from typing import Any

import torch

from scratch_ddp.exercises.trial import Trial
from scratch_ddp.residency import MemoryLedger


def call_within(trial: Trial, budget: int, *args: Any, case: str = "", note: str = "") -> Any:
    """Call the answer as `Trial.call` does, and return its result; state whether it keeps to `budget`.

    budget: elements of float64 that it may hold at once on this rank beside the tensors in `args`, after any of its
    operations (not what a library needs inside one). `note` stands behind the figures where it is exceeded.
    """
    ledger = MemoryLedger(SimpleNamespace(given=args), torch.float64)
    with ledger("before"):
        pass
    given = ledger.moments[0].elements()

    def watched(answer, *args):
        with ledger("call"):
            return answer(*args)

    result = trial.call(*args, case=case, using=watched)
    held = ledger.peak() - given
    complaint = f"holds {held:,} elements at once, budget {budget:,}{f' ({note})' if note else ''}"
    trial.criterion("memory", complaint if held > budget else "")
    return result
