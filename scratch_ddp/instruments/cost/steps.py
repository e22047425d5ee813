"""The forecast of a training step: when each gradient is ready, and all-reduces that queue for one wire.

An all-reduce takes α + β·bytes, and starts once it is posted and the wire is free. The step is the compute plus the
communication that is still under way when the backward ends. Left out are copies and calls on the processor, and the
small message of each step in which the ranks compare which gradients they have, which adds about α.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import nn

from scratch_ddp.common.tensors import MB
from scratch_ddp.ddp.bucketed import FIRST_BUCKET_MB, bucket_plan
from scratch_ddp.instruments.cost.wire import Wire
from scratch_ddp.pipeline.schedules import Schedule
from scratch_ddp.pipeline.simulate import simulate


@dataclass(frozen=True)
class Backward:
    """A backward pass: when each gradient is `ready`, in seconds from its start and in the order of arrival.

    `nbytes`: of each gradient; `seconds`: of the whole backward; `forward`: of the forward before it.
    """

    ready: tuple[float, ...]
    nbytes: tuple[int, ...]
    seconds: float
    forward: float = 0.0

    @classmethod
    def in_proportion(cls, nbytes: Sequence[int], seconds: float, forward: float = 0.0) -> "Backward":
        """A backward in which each gradient, in the order of arrival, takes time proportional to its bytes."""
        whole = sum(nbytes)
        ready = [min(seconds, seconds * so_far / whole) for so_far in accumulate(nbytes)]
        return cls(tuple(ready), tuple(nbytes), seconds, forward)

    @classmethod
    def measured(cls, model: nn.Module, loss: Callable[[], torch.Tensor]) -> "Backward":
        """Run `loss()` and its backward once, with a warm model without hooks, and record each gradient's time."""
        arrived: list[tuple[float, int]] = []

        def note(parameter: torch.Tensor) -> None:
            arrived.append((time.perf_counter(), parameter.grad.nbytes))

        hooks = [each.register_post_accumulate_grad_hook(note) for each in model.parameters() if each.requires_grad]
        began = time.perf_counter()
        value = loss()
        backward_began = time.perf_counter()
        value.backward()
        ended = time.perf_counter()
        for hook in hooks:
            hook.remove()
        ready, nbytes = zip(*((at - backward_began, size) for at, size in arrived), strict=True)
        return cls(ready, nbytes, ended - backward_began, backward_began - began)

    @property
    def total_bytes(self) -> int:
        """Bytes of all gradients."""
        return sum(self.nbytes)


class AllReduce(NamedTuple):
    """One all-reduce of a forecast: when it is posted, starts and ends (seconds after backward starts), its bytes."""

    posted: float
    started: float
    ended: float
    nbytes: int


@dataclass(frozen=True)
class Forecast:
    """A step of one strategy, in seconds. The all-reduces are in the order in which they take the wire."""

    step: float  # forward, backward and exposed communication; without the optimizer
    exposed: float  # communication after the backward's end, which nothing hides
    all_reduces: tuple[AllReduce, ...]

    @property
    def calls(self) -> int:
        """How many all-reduces there are."""
        return len(self.all_reduces)


def naive(backward: Backward, wire: Wire) -> Forecast:
    """One all-reduce per gradient, all of them after the backward: U = α·P + β·n."""
    return _queue(backward, wire, ((backward.seconds, size) for size in backward.nbytes))


def flat(backward: Backward, wire: Wire) -> Forecast:
    """One all-reduce for all gradients, which have one dtype, after the backward: U = α + β·n."""
    return _queue(backward, wire, [(backward.seconds, backward.total_bytes)])


def per_parameter(backward: Backward, wire: Wire) -> Forecast:
    """One all-reduce per gradient, posted when it is ready."""
    return _queue(backward, wire, zip(backward.ready, backward.nbytes, strict=True))


def bucketed(backward: Backward, wire: Wire, bucket_mb: float = 25.0, first_mb: float = FIRST_BUCKET_MB) -> Forecast:
    """One all-reduce per bucket of `BucketedDDP`, in MB of 2²⁰ bytes, posted when its last gradient is ready."""
    plan = bucket_plan(backward.nbytes, bucket_mb * MB, min(first_mb, bucket_mb) * MB)
    return _queue(backward, wire, ((backward.ready[full[-1]], sum(backward.nbytes[i] for i in full)) for full in plan))


def _queue(backward: Backward, wire: Wire, posted: Iterable[tuple[float, int]]) -> Forecast:
    """Send all-reduces, given as (time posted, bytes), one after the other."""
    all_reduces, free = [], 0.0
    for at, nbytes in posted:
        started = max(at, free)
        free = started + wire.all_reduce(nbytes)
        all_reduces.append(AllReduce(at, started, free, nbytes))
    exposed = max(0.0, free - backward.seconds)
    return Forecast(backward.forward + backward.seconds + exposed, exposed, tuple(all_reduces))


def best_bucket_bytes(wire: Wire, nbytes: float, seconds: float) -> float:
    """The best bucket size in bytes by formula, for `nbytes` of gradients that arrive evenly in `seconds`.

    If the wire keeps up, all but the last bucket is hidden, and small ones are best. If not, it is busy from the first
    full bucket on: what sticks out is seconds·b/n + α·n/b and what hangs on no b, least at b = n·√(α/seconds). Beyond
    the size at which the wire just keeps up, larger buckets only lengthen the tail: so the smaller of the two is best.
    """
    alpha, beta = wire.alpha_of_all_reduce, wire.beta_of_all_reduce
    least_overhead = nbytes * math.sqrt(alpha / seconds)
    spare = seconds / nbytes - beta  # seconds of compute per byte, minus its seconds on the wire
    just_keeps_up = alpha / spare if spare > 0 else math.inf
    return min(least_overhead, just_keeps_up, float(nbytes))


def best_bucket(backward: Backward, wire: Wire, first_mb: float = FIRST_BUCKET_MB) -> tuple[float, Forecast]:
    """Find the best bucket size in MB (of 2²⁰ bytes) on this timeline by trying sizes; return it with its forecast.

    Sizes from the smallest gradient to all gradients are tried, four per doubling. Of those within a thousandth of the
    best step, the largest is taken: each message costs the processor something that the forecast leaves out.
    """
    smallest = min(size for size in backward.nbytes if size)
    doublings = math.log2(backward.total_bytes / smallest)
    tried = [smallest * 2 ** (i / 4) for i in range(int(4 * doublings) + 1)]
    candidates = [(size / MB, bucketed(backward, wire, size / MB, first_mb)) for size in [*tried, backward.total_bytes]]
    least = min(forecast.step for _, forecast in candidates)
    return next((size, forecast) for size, forecast in reversed(candidates) if forecast.step <= 1.001 * least)


def pipelined(schedule: Schedule, forward: float, backward: float, nbytes: float, wire: Wire) -> float:
    """Seconds of a step of a pipeline. Messages don't queue for the wire. Raises ValueError for a deadlock.

    `forward`, `backward`: seconds of a stage for one micro-batch; `nbytes`: bytes of an output, and of its gradient.
    """
    cost = {"F": forward, "B": backward, "I": backward / 2, "W": backward / 2}
    return max(row[-1][2] for row in simulate(schedule, cost, wire.message(nbytes)) if row)
