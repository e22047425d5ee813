"""Judges a mended `misbehaving.py` by what its ranks do under torchrun.

As `python -m scratch_ddp.course.capstone.script SCRIPT FOLDER` this module runs the script on a rank and writes down
what it does: the rows that go through the model, in training and otherwise, and for each optimizer step this rank's own
gradients and those that it steps with.
"""

import datetime
import functools
import os
import runpy
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from scratch_ddp.course.capstone import torchrun

MODEL, ITEMS, VALIDATION, EPOCHS = "TwoExperts", 256, 64, 3  # as in the script
PROMISES = {
    "replicas": "every rank steps with the mean gradient, so the replicas stay equal",
    "data": "in an epoch each item is read once, by one rank",
    "ends": "every rank comes to the end, and all validation items are predicted",
}
Seen = list[dict]  # of each rank


def judge(path: Path) -> dict[str, str]:
    """Run the script. Return what is wrong by criterion; "" where it holds."""
    with tempfile.TemporaryDirectory() as folder:
        wrong, _ = torchrun.run(__spec__.name, path.resolve(), folder)
        seen = [torch.load(file) for file in sorted(Path(folder).glob("seen.*"))]
    return complaints(seen, wrong)


def complaints(seen: Seen, end: str) -> dict[str, str]:
    """What is wrong by criterion. `end`: what was wrong with the end of the run, or ""."""
    if len(seen) < torchrun.RANKS or not all(each["steps"] for each in seen):
        return dict.fromkeys(PROMISES, end or "no rank took a step of an optimizer")
    return {"replicas": _replicas(seen), "data": _data(seen), "ends": end or _predictions(seen)}


def _replicas(seen: Seen) -> str:
    """Say whose gradient is not the mean of all ranks' own ones, where a gradient that is missing counts as zero."""
    for number, ranks in enumerate(zip(*(each["steps"] for each in seen), strict=False), start=1):
        for name in dict.fromkeys(name for each in ranks for name in [*each["own"], *each["used"]]):
            absent = [str(rank) for rank, each in enumerate(ranks) if name not in each["own"]]
            unused = f" (it was not used on rank {', '.join(absent)})" if absent else ""
            mean = sum(each["own"].get(name, torch.zeros(())) for each in ranks) / len(ranks)
            for rank, each in enumerate(ranks):
                if not torch.allclose(each["used"].get(name, torch.zeros(())), mean, rtol=1e-4, atol=1e-7):
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


def watch() -> dict[str, list]:
    """From now on, keep what this rank does: `trained` and `predicted` rows, and `steps`."""
    seen: dict[str, list] = {"trained": [], "predicted": [], "steps": []}
    parameters: dict[str, nn.Parameter] = {}
    own: dict[str, torch.Tensor] = {}  # gradients since the last step

    def forward(module: nn.Module, args: tuple) -> None:
        if type(module).__name__ != MODEL:
            return  # a part of it, or a wrapper
        seen["trained" if module.training else "predicted"] += [row.numpy().tobytes() for row in args[0].detach()]
        if not parameters:
            parameters.update(module.named_parameters())
            for name, parameter in parameters.items():
                parameter.register_hook(functools.partial(arrived, name))

    def arrived(name: str, gradient: torch.Tensor) -> None:
        own[name] = own.get(name, 0) + gradient.detach()

    def before_step(*_: Any) -> None:
        used = {name: each.grad.clone() for name, each in parameters.items() if each.grad is not None}
        seen["steps"].append({"own": dict(own), "used": used})
        own.clear()

    register_module_forward_pre_hook(forward)
    register_optimizer_step_pre_hook(before_step)
    return seen


def main(path: Path, folder: Path) -> None:
    """Run the script, whose collectives wait for torchrun.TIMEOUT seconds. What was seen is in `folder`/seen.RANK."""
    seen, limit = watch(), datetime.timedelta(seconds=torchrun.TIMEOUT)
    init = dist.init_process_group
    dist.init_process_group = lambda *args, **options: init(*args, **options | {"timeout": limit})
    sys.argv = [str(path)]
    with torchrun.says_where(path):
        try:
            runpy.run_path(str(path), run_name="__main__")
        finally:
            torch.save(seen, folder / f"seen.{os.environ['RANK']}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
