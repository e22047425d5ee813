"""Judges a mended `misbehaving.py` by what its ranks do under torchrun."""

import tempfile
from collections import Counter
from pathlib import Path

import torch

from scratch_ddp.course.capstone import observe, torchrun

ITEMS, VALIDATION, EPOCHS = 256, 64, 3  # as in the script
PROMISES = {
    "replicas": "every rank steps with the mean gradient, so the replicas stay equal",
    "data": "in an epoch each item is read once, by one rank",
    "ends": "every rank comes to the end, and all validation items are predicted",
}
Seen = list[dict]  # of each rank, what `observe` wrote down


def judge(path: Path) -> dict[str, str]:
    """Run the script. Return what is wrong by criterion; "" where it holds."""
    with tempfile.TemporaryDirectory() as folder:
        ended = torchrun.run(observe.__name__, path.resolve(), folder)
        seen = [torch.load(file) for file in sorted(Path(folder).glob("seen.*"))]
    return complaints(seen, ended.complaint)


def complaints(seen: Seen, end: str) -> dict[str, str]:
    """What is wrong by criterion. `end`: what was wrong with the end of the run, or ""."""
    if len(seen) < torchrun.RANKS or not all(each["steps"] for each in seen):
        return dict.fromkeys(PROMISES, end or "no rank took a step of an optimizer")
    return {"replicas": _replicas(seen), "data": _data(seen), "ends": end or _predictions(seen)}


def _replicas(seen: Seen) -> str:
    """Say whose gradient is not the mean of all ranks' own ones, where a gradient that is missing counts as zero."""
    for number, ranks in enumerate(zip(*(each["steps"] for each in seen), strict=False), start=1):
        for name in dict.fromkeys(name for each in ranks for name in [*each["own"], *each["used"]]):
            own = [each["own"][name] for each in ranks if name in each["own"]]
            absent = [str(rank) for rank, each in enumerate(ranks) if name not in each["own"]]
            unused = f" (it was not used on rank {', '.join(absent)})" if absent else ""
            for rank, each in enumerate(ranks):
                mean = sum(own) / len(ranks) if own else 0.0 * each["used"][name]
                if not torch.allclose(each["used"].get(name, 0.0 * mean), mean, rtol=1e-4, atol=1e-7):
                    text = f"the gradient of {name} that rank {rank} steps with is not the mean over the ranks{unused}"
                    return f"step {number}: {text}"
    return ""


def _data(seen: Seen) -> str:
    share = ITEMS // len(seen)
    parts = [each["trained"][:share] for each in seen]
    for rank, part in enumerate(parts):
        if len(part) < share:
            return f"rank {rank} reads {len(part)} items; its share of an epoch is {share}"
    first, second = map(set, parts)
    if both := first & second:
        return f"in the first epoch, {len(both)} of rank 1's first {share} items are items of rank 0 too"
    if len(first | second) < ITEMS:
        return f"in the first epoch the ranks read {len(first | second)} of the {ITEMS} items"
    return ""


def _predictions(seen: Seen) -> str:
    counts = Counter(row for each in seen for row in each["predicted"])
    if len(counts) < VALIDATION or min(counts.values()) < EPOCHS:
        least = f"one of them {min(counts.values(), default=0)} times in {EPOCHS} epochs"
        return f"{len(counts)} of the {VALIDATION} validation items are predicted, {least}"
    return ""
