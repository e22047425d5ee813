"""Forecast of a training step: the backward's timeline, and messages that queue for one wire.

A message is on the wire for α + β·bytes, begins when it was posted and the wire is free, and so the step is the
compute and what sticks out behind it. What a strategy costs in copies and calls on the processor is left out, and so is
the small message of each step in which ranks tell each other which gradients they have (a byte for each parameter and
buffer). Nothing hides it, so it adds about α.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from numbers import Real

import torch
from torch import nn

from scratch_ddp.common.tensors import MB
from scratch_ddp.ddp.bucketed import FIRST_BUCKET_MB, bucket_plan
from scratch_ddp.instruments.cost.wire import Wire, refuse_unless_finite

# FOLDED: The timeline of a backward pass: when each gradient is ready to be sent.


@dataclass(frozen=True)
class Backward:
    """When each gradient is ready, in the order of arrival, and what surrounds it.

    `ready`: seconds after the backward's start; `nbytes`: bytes of the gradient; `seconds`: the whole backward;
    `forward`: the seconds before it. Raises ValueError if a figure is negative, infinite or NaN, if times run
    backwards or past `seconds`, or if there are not as many sizes as times.
    """

    ready: tuple[float, ...]
    nbytes: tuple[int, ...]
    seconds: float
    forward: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "ready", tuple(self.ready))
        object.__setattr__(self, "nbytes", tuple(self.nbytes))
        refuse_unless_finite(seconds=self.seconds, forward=self.forward)
        for at, size in zip(self.ready, self.nbytes, strict=False):
            refuse_unless_finite(ready=at, nbytes=size)
        if len(self.ready) != len(self.nbytes):
            raise ValueError(f"{len(self.ready)} gradients are ready, but {len(self.nbytes)} sizes are given")
        if any(later < earlier for earlier, later in pairwise(self.ready)):
            raise ValueError("the gradients must stand in the order in which they are ready")
        if self.ready and self.ready[-1] > self.seconds:
            raise ValueError(f"a gradient is ready after {self.ready[-1]:g} s of a backward of {self.seconds:g} s")

    @classmethod
    def in_proportion(cls, nbytes: Sequence[int], seconds: float, forward: float = 0.0) -> "Backward":
        """A backward in which each gradient, in the order of arrival, takes time in proportion to its bytes."""
        refuse_unless_finite(seconds=seconds)
        whole = sum(nbytes)
        ready = [min(seconds, seconds * so_far / whole) if whole else seconds for so_far in accumulate(nbytes)]
        return cls(tuple(ready), tuple(nbytes), seconds, forward)

    @classmethod
    def measured(cls, model: nn.Module, loss: Callable[[], torch.Tensor]) -> "Backward":
        """Run `loss()` and its backward once, and note when each parameter of `model` has its gradient.

        Run it once before, to warm up, and without any strategy's hooks on the model. The gradients stay, added to
        those that were there. No communication. On a GPU the times are those at which Python sees the gradients.
        """
        arrived: list[tuple[float, int]] = []
        hooks = [
            parameter.register_post_accumulate_grad_hook(
                lambda each: arrived.append((time.perf_counter(), each.grad.nbytes))
            )
            for parameter in model.parameters()
            if parameter.requires_grad
        ]
        try:
            began = time.perf_counter()
            value = loss()
            turned = time.perf_counter()
            value.backward()
            ended = time.perf_counter()
        finally:
            for hook in hooks:
                hook.remove()
        ready = tuple(at - turned for at, _ in arrived)
        return cls(ready, tuple(size for _, size in arrived), ended - turned, turned - began)

    @property
    def total_bytes(self) -> int:
        """Bytes of all gradients."""
        return sum(self.nbytes)


@dataclass(frozen=True)
class Message:
    """One all-reduce: when it was posted, when it began and ended (seconds from the backward's start), its bytes."""

    posted: float
    started: float
    ended: float
    nbytes: int


@dataclass(frozen=True)
class Forecast:
    """A step of one strategy. All in seconds; `messages` in the order in which they take the wire."""

    step: float  # forward, backward and what sticks out; without the optimizer
    exposed: float  # communication after the backward's end: nothing hides it
    messages: tuple[Message, ...]

    @property
    def calls(self) -> int:
        """How many all-reduces there are."""
        return len(self.messages)

    @property
    def communication(self) -> float:
        """Seconds for which the wire is busy, hidden or not."""
        return sum(message.ended - message.started for message in self.messages)

    @property
    def hidden(self) -> float:
        """Seconds of communication that run beside the backward."""
        return self.communication - self.exposed


def naive(backward: Backward, wire: Wire) -> Forecast:
    """One all-reduce for each gradient, all of them after the backward: U = α·P + β·n."""
    return _queue(backward, wire, ((backward.seconds, size) for size in backward.nbytes))


def flat(backward: Backward, wire: Wire) -> Forecast:
    """One all-reduce for all gradients, after the backward: U = α + β·n. All of one dtype."""
    return _queue(backward, wire, [(backward.seconds, backward.total_bytes)] if backward.nbytes else [])


def per_parameter(backward: Backward, wire: Wire) -> Forecast:
    """One all-reduce for each gradient, posted when it is ready."""
    return _queue(backward, wire, zip(backward.ready, backward.nbytes, strict=True))


def bucketed(backward: Backward, wire: Wire, bucket_mb: float = 25.0, first_mb: float = FIRST_BUCKET_MB) -> Forecast:
    """One all-reduce for each bucket of `bucket_mb` (of 2²⁰ bytes), posted when its last gradient is ready.

    Buckets are filled as `bucket_plan` says, the first with `first_mb` or `bucket_mb`, whichever is less. With a
    `bucket_mb` larger than the model, `math.inf` for one, all that follows the first bucket is one bucket, as in
    `BucketedDDP`. Raises ValueError unless both sizes are numbers and more than 0.
    """
    for name, size in (("bucket_mb", bucket_mb), ("first_mb", first_mb)):
        if not isinstance(size, Real) or not size > 0:  # nan is not
            raise ValueError(f"{name} must be a number of 2²⁰ bytes, more than 0, not {size!r}")
    return grouped(backward, wire, bucket_plan(backward.nbytes, bucket_mb * MB, min(first_mb, bucket_mb) * MB))


def grouped(backward: Backward, wire: Wire, plan: Iterable[Sequence[int]]) -> Forecast:
    """One all-reduce for each group of gradients, given by their positions in the order of arrival.

    A group is posted when its last gradient is ready and the group before it has been posted, so that all ranks post
    in one order. Raises ValueError unless the plan holds each gradient once.
    """
    plan = [list(group) for group in plan]
    if sorted(position for group in plan for position in group) != list(range(len(backward.nbytes))):
        raise ValueError(f"the plan must hold each of {len(backward.nbytes)} gradients once")
    full = accumulate((max(backward.ready[i] for i in group) for group in plan), max)
    return _queue(backward, wire, zip(full, [sum(backward.nbytes[i] for i in group) for group in plan], strict=True))


def _queue(backward: Backward, wire: Wire, posted: Iterable[tuple[float, int]]) -> Forecast:
    """Send the messages (when posted, bytes) one after the other."""
    messages, free = [], 0.0
    for at, nbytes in posted:
        started = max(at, free)
        free = started + wire.all_reduce(nbytes)
        messages.append(Message(at, started, free, nbytes))
    exposed = max(0.0, free - backward.seconds)
    return Forecast(backward.forward + backward.seconds + exposed, exposed, tuple(messages))


# FOLDED: The best bucket size: by trying sizes on a backward's timeline, and by a formula.
#
# Let n bytes of gradients arrive evenly over a backward of $T_b$ seconds and be sent in n/b buckets of b bytes, each of
# which takes $s = \alpha + \beta b$ on the wire. A bucket is full every $p = T_b\,b/n$ seconds.
#
# * The wire keeps up ($s \le p$): all but the last bucket is hidden, $U(b) = \alpha + \beta b$.
# * It does not: it is busy from the first full bucket on, so by T = α·P + β·n it ends at $p + \alpha n/b + \beta n$, and
#   $U(b) = T_b\,b/n + \alpha n/b + \beta n - T_b$.
#
# U is the larger of the two. The second is smallest where its derivative $T_b/n - \alpha n/b^2$ is 0, at
# $b = n\sqrt{\alpha/T_b}$ (if wire and compute are in balance, $T_b = \beta n$, that is $\sqrt{\alpha n/\beta}$). Larger
# buckets than those with which the wire just keeps up, $s = p$, at $b = \alpha/(T_b/n - \beta)$, gain nothing: only the
# tail grows. So the best size is the smaller of the two, and never more than n.

_STEPS_PER_DOUBLING = 4  # of the sizes that the search tries


def best_bucket_bytes(wire: Wire, nbytes: float, seconds: float) -> float:
    """The best bucket size in bytes by the formula (derived above), for `nbytes` of gradients in `seconds` of backward.

    Assumes that gradients arrive evenly, can be cut anywhere, and that the first bucket is as large as the others.
    0 where a message costs nothing but its bytes: the smaller the better. Raises ValueError on bad figures.
    """
    refuse_unless_finite(nbytes=nbytes, seconds=seconds)
    alpha, beta = wire.alpha_of_all_reduce, wire.beta_of_all_reduce
    if alpha == 0 or nbytes == 0:
        return 0.0
    if seconds == 0:
        return float(nbytes)
    least_overhead = nbytes * math.sqrt(alpha / seconds)
    spare = seconds / nbytes - beta  # seconds of compute for a byte beyond its seconds on the wire
    just_keeps_up = alpha / spare if spare > 0 else math.inf
    return min(least_overhead, just_keeps_up, float(nbytes))


def exposed_seconds(wire: Wire, nbytes: float, seconds: float, bucket_bytes: float) -> float:
    """U(b) by the formula above: seconds of communication that stick out behind the backward."""
    refuse_unless_finite(nbytes=nbytes, seconds=seconds, bucket_bytes=bucket_bytes)
    if nbytes == 0:
        return 0.0
    if bucket_bytes == 0:
        raise ValueError("bucket_bytes must be more than 0")
    bucket = min(bucket_bytes, nbytes)
    alpha, beta = wire.alpha_of_all_reduce, wire.beta_of_all_reduce
    tail = alpha + beta * bucket
    queue = seconds * bucket / nbytes + alpha * nbytes / bucket + beta * nbytes - seconds
    return max(tail, queue)


def best_bucket(backward: Backward, wire: Wire, first_mb: float = FIRST_BUCKET_MB) -> tuple[float, Forecast]:
    """The best bucket size in MB (of 2²⁰ bytes) on this timeline, and its forecast, found by trying sizes.

    From the smallest gradient to all of them, four sizes each doubling. Of sizes whose steps are within a thousandth
    of the best the largest is taken: each message costs the processor something that the forecast leaves out. Raises
    ValueError for a backward without gradients.
    """
    sizes = [size for size in backward.nbytes if size]
    if not sizes:
        raise ValueError("there is no gradient to put into buckets")
    doublings = math.log2(backward.total_bytes / min(sizes))
    tried = [min(sizes) * 2 ** (i / _STEPS_PER_DOUBLING) for i in range(int(doublings * _STEPS_PER_DOUBLING) + 1)]
    candidates = [(size / MB, bucketed(backward, wire, size / MB, first_mb)) for size in [*tried, backward.total_bytes]]
    least = min(forecast.step for _, forecast in candidates)
    return next((size, forecast) for size, forecast in reversed(candidates) if forecast.step <= 1.001 * least)
