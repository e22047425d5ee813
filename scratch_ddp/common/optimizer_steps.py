"""What a wrapper checks when an optimizer steps: torch calls `before_step` of every wrapper that is alive."""

import itertools
import weakref
from typing import Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

REDUCED = "is_reduced"  # an attribute of gradients that are means over the ranks, on one rank alone (ZeRO-2)
SYNC_FORGOTTEN = (
    "the optimizer steps with gradients that were not synchronised: call sync_gradients() after backward and before "
    "step(), outside of no_sync()"
)


class Watcher(Protocol):
    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise if the optimizer must not step. It communicates only where something is wrong."""


_watchers: weakref.WeakValueDictionary[int, Watcher] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def watch_steps(watcher: Watcher) -> None:
    """Have `watcher.before_step` called before each step of any optimizer, as long as the watcher lives."""
    _watchers[next(_numbers)] = watcher  # in the order of construction, which is the same on every rank


def parameters_of(optimizer: torch.optim.Optimizer) -> set[torch.Tensor]:
    """All parameters of an optimizer."""
    return {parameter for group in optimizer.param_groups for parameter in group["params"]}


def _before_step(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
    for watcher in list(_watchers.values()):
        watcher.before_step(optimizer)


register_optimizer_step_pre_hook(_before_step)
