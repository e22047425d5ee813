"""A training loop put to the test: one epoch of it, and how far the ranks' gradients were apart at each moment.

What is noted costs messages of its own, which `traffic` counts apart.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.common.accounting import set_up
from scratch_ddp.ddp import SimpleDistributedDataParallelism
from scratch_ddp.instruments.traffic import traffic

Loop = Callable[[nn.Module, torch.optim.Optimizer, Sequence, int], None]  # (model, optimizer, batches, n)


class Watched(SimpleDistributedDataParallelism):
    """Notes in `events` how far the ranks' gradients are apart, as (when, largest difference).

    `when` is "backward" and "sync" for the beginning and the end of each `sync_gradients()`, which a loop calls after
    every backward, also in a `no_sync()` block; others may `note` more.
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup | None = None):
        super().__init__(model, group)
        self.events: list[tuple[str, float]] = []

    def note(self, when: str) -> None:
        """Note how far the gradients are apart now. Collective: a broadcast and an all-reduce of one number."""
        gradients = (p.new_zeros(p.shape) if p.grad is None else p.grad for p in self.parameters())
        self.events.append((when, apart(gradients, group=self.group)))

    def sync_gradients(self) -> None:
        self.note("backward")
        super().sync_gradients()
        self.note("sync")


@dataclass(frozen=True)
class Tried:
    """What a loop has done in an epoch."""

    model: Watched
    all_reduces: int  # of this rank, for training

    @property
    def events(self) -> list[tuple[str, float]]:
        """("backward" | "sync" | "step", how far the ranks' gradients were apart), in their order."""
        return self.model.events

    @property
    def steps(self) -> list[int]:
        """How many micro-batches there were before each step, counted from the step before."""
        return self._windows()[:-1]

    @property
    def left_over(self) -> int:
        """How many micro-batches came after the last step."""
        return self._windows()[-1]

    def apart_at(self, when: str) -> list[float]:
        """How far the ranks' gradients were apart at each "backward", "sync" or "step"."""
        return [difference for what, difference in self.events if what == when]

    def report(self, alone: nn.Module) -> None:
        """Print what the loop has done, and how far the model is from `alone`, trained by one process. Collective."""
        print(f"micro-batches in each step: {self.steps}, left over: {self.left_over}")
        print(f"all-reduces: {self.all_reduces}")
        between = apart(self.model.parameters(), group=self.model.group)
        off = apart(self.model.parameters(), alone.parameters(), group=self.model.group)
        print(f"parameters: ranks apart by {between:.3f}, off from alone by {off:.3f}")

    def _windows(self) -> list[int]:
        """Micro-batches up to each step, and after the last."""
        windows = [0]
        for when, _ in self.events:
            windows[-1] += when == "backward"
            if when == "step":
                windows.append(0)
        return windows


def try_out(loop: Loop, model: nn.Module, batches: Sequence, n: int, lr: float = 0.1) -> Tried:
    """Call `loop(model, optimizer, batches, n)` with the model watched and an SGD that notes each step.

    `batches` are this rank's micro-batches, `n` how many of them the loop is to accumulate. Collective, on all ranks.
    """
    watched = Watched(model)
    optimizer = torch.optim.SGD(watched.parameters(), lr=lr)
    optimizer.register_step_pre_hook(lambda *_: watched.note("step"))
    with traffic() as counted:
        loop(watched, optimizer, batches, n)
    return Tried(watched, counted.calls.get("all_reduce", 0))


def apart(
    tensors: Iterable[torch.Tensor],
    reference: Iterable[torch.Tensor] | None = None,
    group: dist.ProcessGroup | None = None,
) -> float:
    """Return the largest difference, on any rank, of a number in `tensors` from `reference`, or else from rank 0's.

    The same on every rank of the group; `tensors` have one dtype, and the same shapes on all ranks and in `reference`.
    """
    mine = _flat(tensors)
    with set_up():
        if reference is None:
            other = mine.clone()
            dist.broadcast(other, group=group, group_src=0)
        else:
            other = _flat(reference)
        largest = (mine - other).abs().max()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return largest.item()


def _flat(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])
