"""A training job with a fault planted in it, to be found from its profile.

The model sleeps for a time that depends on the rows of its batch, and the link is simulated, so that the fault looks
the same on any machine.
"""

import random
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.instruments.network import Link, LinkedGroup
from scratch_ddp.instruments.network.clock import now, sleep_until, take_time
from scratch_ddp.instruments.timeline import Breakdown, Timeline, breakdown_of_steps, timeline
from scratch_ddp.minimal.ddp import DataParallel, OverlappedDDP

LOADER, ITEM, STRAGGLER, BUCKET, BATCH = "loader", ".item()", "straggler", "last bucket", "uneven batches"
FAULTS = (LOADER, ITEM, STRAGGLER, BUCKET, BATCH)
WITH_A_RANK = (LOADER, STRAGGLER)  # faults of one rank

ROWS, WIDTH, LAYERS = 8, 106, 4  # of a batch; features of a layer; layers
FORWARD, BACKWARD = 1e-3, 2e-3  # seconds of a layer for a row
LOADING = 4e-3  # seconds for a batch
METRICS = 10  # logged in a step
PARTS = ("data", "forward", "backward", "waiting", "transfer")  # of a step, as `culprit` gets them

_SLOW_LOADING, _SLOWER, _MORE_ROWS, _LARGER = 60e-3, 1.8, 6, 5
_CALL, _LAYER = 4e-3, 8e-3  # seconds on the link: of a call, of a layer's gradients


@dataclass
class Job:
    """What a training loop needs: `next_batch()`, `model`, `log(loss)`, `optimizer`. At most one fault is in it.

    fault: one of FAULTS; "" for none. at: the rank that has it, where it is one rank's. rows: of this rank's batches.
    dtype: of the model. The group gets a link on which a layer's gradients take somewhat less time than its backward.
    """

    group: LinkedGroup
    fault: str = ""
    at: int = 0
    strategy: type[DataParallel] = OverlappedDDP
    rows: int = ROWS
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        self.rank, self.size, self.batches, self.losses = self.group.rank(), self.group.size(), 0, []
        slower = _SLOWER if self.fault == STRAGGLER and self.rank == self.at else 1.0
        self.inputs = _LARGER * WIDTH if self.fault == BUCKET else WIDTH
        torch.manual_seed(43)
        layers = [nn.Linear(WIDTH if place else self.inputs, WIDTH, bias=False) for place in range(LAYERS)]
        for layer in layers:
            layer.register_forward_hook(partial(_take_time, slower))
        self.model = self.strategy(nn.Sequential(*layers).to(self.dtype), group=self.group)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4)
        self.group.link = Link(_CALL, _LAYER / (2 * (self.size - 1) / self.size * 4 * WIDTH**2))

    def next_batch(self) -> torch.Tensor:
        """A batch of this rank's rows; in a profile it is called "data"."""
        with torch.profiler.record_function("data"):
            slow = self.fault == LOADER and self.rank == self.at
            sleep_until(now() + (_SLOW_LOADING if slow else LOADING))
            longer = self.fault == BATCH and (self.at + self.batches) % self.size == self.rank
            self.batches += 1
            return torch.ones(self.rows + _MORE_ROWS * longer, self.inputs, dtype=self.dtype)

    def log(self, loss: torch.Tensor) -> None:
        """Keep the losses, or, as a fault, read means over all ranks at once."""
        if self.fault != ITEM:
            self.losses.append(loss.detach())
            return
        for _ in range(METRICS):
            mean = loss.detach().clone()
            dist.all_reduce(mean, group=self.group)
            self.losses.append(mean.item())


def _take_time(slower: float, _: nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor:
    return take_time(output, slower * FORWARD * len(output), slower * BACKWARD * len(output))


def job_with_a_slow_rank(group: LinkedGroup, strategy: type[DataParallel], rows: int = ROWS) -> Job:
    """A job in which one rank computes more slowly than the others; `at` says which. See `Job`."""
    return Job(group, STRAGGLER, 2, strategy, rows=rows)


class Game:
    """A job with a fault that nobody is told. `steps` and `timelines` are its profile, for every rank the same.

    Collective: every rank makes it.
    """

    def __init__(self, group: LinkedGroup):
        drawn = [random.choice(FAULTS), random.randrange(group.size())]
        dist.broadcast_object_list(drawn, group=group, group_src=0)
        self._fault, self._at = drawn
        self.timelines, self.steps = profile(Job(group, self._fault, self._at), steps=6)

    def answer(self, fault: str | None, rank: int | None = None) -> bool:
        """Say whether this is the fault, and the rank if it is a fault of one rank; None gives up and is told both."""
        of_a_rank = self._fault in WITH_A_RANK
        whole = f"{self._fault} on rank {self._at}" if of_a_rank else self._fault
        right = fault == self._fault and (not of_a_rank or rank == self._at)
        if right or fault is None:
            print(f"{'Right' if right else 'It was'}: {whole}.")
        elif fault == self._fault:
            print("Right fault, wrong rank: try again.")
        else:
            print(f"Not {fault}: try again. It is one of {', '.join(FAULTS)}.")
        return right


def train(job: Job) -> None:
    """One step of the job."""
    inputs = job.next_batch()
    loss = job.model(inputs).float().square().mean()
    job.log(loss)
    loss.backward()
    job.model.sync_gradients()
    job.optimizer.step()
    job.optimizer.zero_grad()


def profile(job: Job, steps: int) -> tuple[list[Timeline], list[list[Breakdown]]]:
    """The timelines of all ranks and the breakdown of each step, after a step that is not recorded. Collective."""
    train(job)
    with timeline(job.group, call_sites=True) as recorded:
        for _ in range(steps):
            with recorded.step():
                train(job)
    timelines = recorded.over_ranks(job.group)
    return timelines, breakdown_of_steps(timelines)
