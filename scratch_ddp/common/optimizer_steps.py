"""What a wrapper checks when an optimizer steps: torch calls `before_step` of every wrapper that is alive."""

import itertools
import weakref
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

REDUCED = "is_reduced"  # an attribute of gradients that are means over the ranks, on one rank alone (ZeRO-2)
SYNC_FORGOTTEN = (
    "the optimizer steps with gradients that were not synchronised: call sync_gradients() after backward and before "
    "step(), outside of no_sync()"
)


_watchers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def watch_steps(watcher: Any) -> None:
    """Have `watcher.before_step(optimizer)` called before each step of any optimizer, as long as the watcher lives.

    It raises if the optimizer must not step, and communicates only then.
    """
    _watchers[next(_numbers)] = watcher  # in the order of construction, which is the same on every rank


def parameters_of(optimizer: torch.optim.Optimizer) -> set[torch.Tensor]:
    """All parameters of an optimizer."""
    return {parameter for group in optimizer.param_groups for parameter in group["params"]}


def _before_step(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
    for watcher in list(_watchers.values()):
        watcher.before_step(optimizer)


register_optimizer_step_pre_hook(_before_step)
