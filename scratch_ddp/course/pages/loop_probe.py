"""A training loop under test: one epoch of it, and how much the ranks' gradients differed at each event.

Comparing the ranks costs messages, which `traffic` counts as set-up.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.common.accounting import set_up
from scratch_ddp.instruments.traffic import traffic
from scratch_ddp.minimal.ddp import SimpleDistributedDataParallelism

Loop = Callable[[nn.Module, torch.optim.Optimizer, Sequence, int], None]  # (model, optimizer, batches, n)


class ProbedModel(SimpleDistributedDataParallelism):
    """Records in `events` how much the ranks' gradients differ, as (when, largest difference).

    `when` is "backward" at the start and "sync" at the end of each `sync_gradients()`, which a loop calls after every
    backward, even in a `no_sync()` block. Further events may be recorded by `probe`.
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup | None = None):
        super().__init__(model, group)
        self.events: list[tuple[str, float]] = []

    def probe(self, when: str) -> None:
        """Record how much the gradients differ now. Collective: a broadcast and an all-reduce of one number."""
        gradients = (p.new_zeros(p.shape) if p.grad is None else p.grad for p in self.parameters())
        self.events.append((when, apart(gradients, group=self.group)))

    def sync_gradients(self) -> None:
        self.probe("backward")
        super().sync_gradients()
        self.probe("sync")


@dataclass(frozen=True)
class Tried:
    """What a loop did in one epoch."""

    model: ProbedModel
    all_reduces: int  # of this rank, without set-up

    @property
    def events(self) -> list[tuple[str, float]]:
        """("backward" | "sync" | "step", largest difference between the ranks' gradients), in order."""
        return self.model.events

    @property
    def steps(self) -> list[int]:
        """How many micro-batches went into each step."""
        return self._windows()[:-1]

    @property
    def left_over(self) -> int:
        """How many micro-batches came after the last step."""
        return self._windows()[-1]

    def apart_at(self, when: str) -> list[float]:
        """The largest difference between the ranks' gradients at each "backward", "sync" or "step"."""
        return [difference for what, difference in self.events if what == when]

    def report(self, alone: nn.Module) -> None:
        """Print what the loop did, and how much the model differs from `alone`, trained by one process. Collective."""
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
    """Call `loop(model, optimizer, batches, n)` with a probed model and an SGD that records each step.

    `batches` are this rank's micro-batches; the loop shall accumulate `n` of them per step. Collective, on all ranks.
    """
    probed = ProbedModel(model)
    optimizer = torch.optim.SGD(probed.parameters(), lr=lr)
    optimizer.register_step_pre_hook(lambda *_: probed.probe("step"))
    with traffic() as counted:
        loop(probed, optimizer, batches, n)
    return Tried(probed, counted.calls.get("all_reduce", 0))


def apart(
    tensors: Iterable[torch.Tensor],
    reference: Iterable[torch.Tensor] | None = None,
    group: dist.ProcessGroup | None = None,
) -> float:
    """Return the largest difference of any number in any rank's `tensors` from `reference`, by default from rank 0's.

    The result is the same on every rank of the group. `tensors` have one dtype, and the same shapes on all ranks and in
    `reference`. Costs an all-reduce of one number, and without `reference` a broadcast.
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
