"""A training loop under test: one epoch of it, and how much the ranks' gradients differed at each event."""

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.common.accounting import set_up
from scratch_ddp.instruments.traffic import traffic
from scratch_ddp.minimal.ddp import SimpleDistributedDataParallelism

Loop = Callable[[nn.Module, torch.optim.Optimizer, Sequence, int], None]  # (model, optimizer, batches, n)


class Tried(SimpleDistributedDataParallelism):
    """The model that a loop trains, and what the loop did.

    `events`: (when, largest difference between the ranks' gradients), in order. `when` is "backward" at the start and
    "sync" at the end of each `sync_gradients()`, which a loop calls after every backward, and "step" at each step.
    `steps`: how many micro-batches went into each. `left_over`: how many came after the last. `all_reduces`: of this
    rank. Comparing the ranks costs messages, which `traffic` counts as set-up.
    """

    def __init__(self, model: nn.Module):
        super().__init__(model)
        self.events: list[tuple[str, float]] = []
        self.steps: list[int] = []
        self.left_over = self.all_reduces = 0

    def sync_gradients(self) -> None:
        self.left_over += 1
        self._note("backward")
        super().sync_gradients()
        self._note("sync")

    def before_step(self, *_: object) -> None:
        self.steps.append(self.left_over)
        self.left_over = 0
        self._note("step")

    def report(self, alone: nn.Module) -> None:
        """Print what the loop did, and how much the model differs from `alone`, trained by one process. Collective."""
        print(f"micro-batches in each step: {self.steps}, left over: {self.left_over}")
        print(f"all-reduces: {self.all_reduces}")
        between, off = apart(self.parameters()), apart(self.parameters(), alone.parameters())
        print(f"parameters: ranks apart by {between:.3f}, off from alone by {off:.3f}")

    def _note(self, when: str) -> None:
        self.events.append((when, apart(torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters())))


def try_out(loop: Loop, model: nn.Module, batches: Sequence, n: int) -> Tried:
    """Call `loop(model, optimizer, batches, n)` on all ranks, with SGD. The loop shall accumulate n batches a step."""
    tried = Tried(model)
    optimizer = torch.optim.SGD(tried.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(tried.before_step)
    with traffic() as counted:
        loop(tried, optimizer, batches, n)
    tried.all_reduces = counted.calls.get("all_reduce", 0)
    return tried


def apart(tensors: Iterable[torch.Tensor], reference: Iterable[torch.Tensor] | None = None) -> float:
    """Return the largest difference of any number in any rank's `tensors` from `reference`, by default from rank 0's.

    The same on every rank. Costs an all-reduce of one number, and without `reference` a broadcast.
    """
    mine = nn.utils.parameters_to_vector(tensors).detach()
    other = mine.clone() if reference is None else nn.utils.parameters_to_vector(reference).detach()
    with set_up():
        if reference is None:
            dist.broadcast(other, 0)
        largest = (mine - other).abs().max()
        dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.item()
