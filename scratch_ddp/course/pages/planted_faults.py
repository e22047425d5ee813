"""A training job with a fault planted in it, to be found from its profile; and the method that finds it.

The model sleeps for a time that depends on the rows of its batch, and the link is simulated, so that the fault looks
the same on any machine.
"""

import statistics
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.instruments.network import Link, LinkedGroup
from scratch_ddp.instruments.network.clock import now, sleep_until, take_time
from scratch_ddp.instruments.timeline import Breakdown, Timeline, breakdown_of_steps, timeline
from scratch_ddp.instruments.timeline.breakdown import collectives
from scratch_ddp.minimal.ddp import DataParallel, OverlappedDDP

LOADER, ITEM, STRAGGLER, BUCKET, BATCH = "loader", ".item()", "straggler", "last bucket", "uneven batches"
FAULTS = (LOADER, ITEM, STRAGGLER, BUCKET, BATCH)
WITH_A_RANK = (LOADER, STRAGGLER)  # faults of one rank

ROWS, WIDTH, LAYERS = 8, 106, 4  # of a batch; features of a layer; layers
FORWARD, BACKWARD = 1e-3, 2e-3  # seconds of a layer for a row
LOADING = 4e-3  # seconds for a batch
METRICS = 10  # logged in a step
SMALL = 1024  # bytes; a message below holds no gradient

_SLOW_LOADING, _SLOWER, _MORE_ROWS, _LARGER = 60e-3, 1.8, 6, 5
_SLOW_RANK = 2  # of `job_with_a_slow_rank`
_CALL, _LAYER = 4e-3, 8e-3  # seconds on the link: of a call, of a layer's gradients


class _Layer(nn.Linear):
    def __init__(self, inputs: int, slower: float):
        super().__init__(inputs, WIDTH, bias=False)
        self.slower = slower

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seconds = self.slower * len(x)
        return take_time(super().forward(x), FORWARD * seconds, BACKWARD * seconds)


class Job:
    """What a training loop needs: `next_batch()`, `model`, `log(loss)`, `optimizer`. At most one fault is in it.

    fault: one of FAULTS; "" for none. at: the rank that has it, where it is one rank's. rows: of this rank's batches.
    dtype: of the model. Unless `link` is False, the group gets a link on which a layer's gradients take somewhat less
    time than its backward.
    """

    def __init__(
        self,
        group: LinkedGroup,
        fault: str = "",
        at: int = 0,
        strategy: type[DataParallel] = OverlappedDDP,
        link: bool = True,
        rows: int = ROWS,
        dtype: torch.dtype = torch.float32,
    ):
        if fault and fault not in FAULTS:
            raise ValueError(f"there is no fault {fault!r}; there are {', '.join(FAULTS)}")
        self.group, self.fault, self.at = group, fault, at
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.dtype, self.rows, self.batches, self.losses = dtype, rows, 0, []
        slower = _SLOWER if fault == STRAGGLER and self.rank == at else 1.0
        self.inputs = _LARGER * WIDTH if fault == BUCKET else WIDTH
        torch.manual_seed(43)
        layers = (_Layer(WIDTH if place else self.inputs, slower) for place in range(LAYERS))
        self.model = strategy(nn.Sequential(*layers).to(dtype), group=group)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4)
        if link:
            wire_bytes = 2 * (self.size - 1) / self.size * 4 * WIDTH**2
            group.link = Link(_CALL, _LAYER / wire_bytes)

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


def job_with_a_slow_rank(group: LinkedGroup, strategy: type[DataParallel], link: bool = True, rows: int = ROWS) -> Job:
    """A job in which one rank computes more slowly than the others; `at` says which. See `Job`."""
    return Job(group, STRAGGLER, _SLOW_RANK, strategy, link, rows)


class Game:
    """A job with a fault that nobody is told. `steps` and `timelines` are its profile, for every rank the same.

    Collective: every rank makes it. `seed`: draws the fault; by default rank 0's clock does.
    """

    STEPS = 6

    def __init__(self, group: LinkedGroup, seed: int | None = None):
        drawn = [time.time_ns() // 1000 if seed is None else seed]
        dist.broadcast_object_list(drawn, group=group, group_src=0)
        generator = torch.Generator().manual_seed(drawn[0])
        which, self._at = (int(torch.randint(n, (), generator=generator)) for n in (len(FAULTS), group.size()))
        self._fault = FAULTS[which]
        self.timelines, self.steps = profile(Job(group, self._fault, self._at), self.STEPS)

    def answer(self, fault: str | None, rank: int | None = None) -> bool:
        """Print whether this is the fault, and whether the rank is right if it is a fault of one rank.

        Returns whether all of it is right; prints what it was if not. `fault` None: no guess.
        """
        culprit = f"{self._fault} on rank {self._at}" if self._fault in WITH_A_RANK else self._fault
        if fault is not None and fault not in FAULTS:
            raise ValueError(f"your guess {fault!r} is none of {', '.join(FAULTS)}")
        right = fault == self._fault and (self._fault not in WITH_A_RANK or rank == self._at)
        print(f"Right: {culprit}." if right else f"It was: {culprit}.")
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


def profile(job: Job, steps: int, clock: list[float] | None = None) -> tuple[list[Timeline], list[list[Breakdown]]]:
    """The timelines of all ranks and the breakdown of each step, after a step that is not recorded. Collective.

    clock: gets the seconds of each step by this rank's own clock, those of the first one, too.
    """

    def timed() -> None:
        began = time.perf_counter()
        train(job)
        if clock is not None:
            clock.append(time.perf_counter() - began)

    timed()
    with timeline(job.group, call_sites=True) as recorded:
        for _ in range(steps):
            with recorded.step():
                timed()
    timelines = recorded.over_ranks(job.group)
    return timelines, breakdown_of_steps(timelines)


def culprit(timelines: Sequence[Timeline], steps: Sequence[Sequence[Breakdown]]) -> tuple[str, int | None]:
    """Name the fault of a job from its profile: one of FAULTS, and the rank if it is a fault of one rank."""

    def median(rank, *parts):
        return statistics.median(step[rank].seconds(*parts) for step in steps)

    ranks = range(len(timelines))
    whole = statistics.median(step[0].step for step in steps)
    loading = [median(rank, "data") for rank in ranks]
    if max(loading) > 0.2 * whole:
        return LOADER, loading.index(max(loading))

    computing = [[step[rank].seconds("forward", "backward") for rank in ranks] for step in steps]
    behind = [max(each) - statistics.median(each) for each in computing]  # by how much the slowest rank is
    if statistics.median(behind) > 0.15 * whole:
        slowest = [each.index(max(each)) for each in computing]
        often = statistics.mode(slowest)
        if slowest.count(often) > len(steps) / 2:
            return STRAGGLER, often
        return BATCH, None

    calls = collectives(timelines)[0]
    small = sum(call.ended - call.ready for call in calls if call.nbytes < SMALL)
    return (ITEM if small > sum(each.seconds("transfer") for each, *_ in steps) / 2 else BUCKET), None
