"""Judges a mended `misbehaving.py` by what its ranks do: the rows that go through the model, in training and otherwise,
and for each optimizer step a rank's own gradients and those that it steps with.
"""

import functools
import runpy
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from scratch_ddp.course.capstone import ranks

MODEL, ITEMS, VALIDATION, EPOCHS = "TwoExperts", 256, 64, 3  # as in the script
PROMISES = {
    "replicas": "every rank steps with the mean gradient, so the replicas stay equal",
    "data": "in an epoch each item is read once, by one rank",
    "ends": "every rank comes to the end, and all validation items are predicted",
}
Seen = Sequence[dict[str, list]]  # of each rank, as `watch` says


def judge(path: Path, waits: float = ranks.TIMEOUT) -> dict[str, str]:
    """Run the script on two ranks. Return what is wrong by criterion; "" where it holds."""
    told, died = ranks.run(2, observed, path.resolve(), waits=waits)
    seen, ends = [each for each, _ in told], died or ranks.causes(words for _, words in told)
    if not seen or not all(each["steps"] for each in seen):
        return dict.fromkeys(PROMISES, ends or "no rank took a step of an optimizer")
    return {"replicas": _replicas(seen), "data": _data(seen), "ends": ends or _predictions(seen)}


def _replicas(seen: Seen) -> str:
    """Say whose gradient is not the mean of all ranks' own ones, where a gradient that is missing counts as zero."""
    for number, step in enumerate(zip(*(each["steps"] for each in seen), strict=False), start=1):
        for name in dict.fromkeys(name for each in step for name in [*each["own"], *each["used"]]):
            absent = [str(rank) for rank, each in enumerate(step) if name not in each["own"]]
            unused = f" (it was not used on rank {', '.join(absent)})" if absent else ""
            mean = sum(each["own"].get(name, torch.zeros(())) for each in step) / len(step)
            for rank, each in enumerate(step):
                if not torch.allclose(each["used"].get(name, torch.zeros(())), mean, rtol=1e-4, atol=1e-7):
                    text = f"the gradient of {name} that rank {rank} steps with is not the mean over the ranks{unused}"
                    return f"step {number}: {text}"
    return ""


def _data(seen: Seen) -> str:
    counts = Counter(row for each in seen for row in each["trained"][: ITEMS // len(seen)])
    if len(counts) == ITEMS:
        return ""
    twice = sum(number > 1 for number in counts.values())
    return f"in the first epoch the ranks read {len(counts)} of the {ITEMS} items, {twice} of them more than once"


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


def observed(path: Path) -> tuple[dict[str, list], str]:
    """On a rank that has a process group already: run the script. Return what was seen, and how it ended."""
    seen = watch()
    dist.init_process_group = dist.destroy_process_group = lambda *_, **__: None
    sys.argv = [str(path)]
    return seen, ranks.end_of(path, lambda: runpy.run_path(str(path), run_name="__main__"))
