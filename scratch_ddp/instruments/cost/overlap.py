"""Forecast of a training step: the backward's timeline, and messages that queue for one wire.

A message is on the wire for α + β·bytes, begins when it was posted and the wire is free, and so the step is the
compute and what sticks out behind it. What a strategy costs in copies and calls on the processor is left out, and so is
the small message of each step in which ranks tell each other which gradients they have (a byte for each parameter and
buffer). Nothing hides it, so it adds about α.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from numbers import Real

from scratch_ddp.cost.backward import Backward
from scratch_ddp.cost.wire import MB, Wire

FIRST_BUCKET_MB = 1.0  # as in torch's DDP: the wire has something to do early


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


def bucket_plan(nbytes: Sequence[int], limit: float, first: float) -> list[list[int]]:
    """Put gradients, given by their bytes in the order of arrival, into buckets; returns their positions.

    The rule of torch's DDP: a bucket is closed by the gradient with which it reaches `limit` bytes (the first bucket:
    `first` bytes), so a gradient is never cut and a bucket may be larger than the limit.
    """
    buckets: list[list[int]] = [[]]
    held = 0
    for position, size in enumerate(nbytes):
        buckets[-1].append(position)
        held += size
        if held >= (first if len(buckets) == 1 else limit):
            buckets.append([])
            held = 0
    return [bucket for bucket in buckets if bucket]


def _queue(backward: Backward, wire: Wire, posted: Iterable[tuple[float, int]]) -> Forecast:
    """Send the messages (when posted, bytes) one after the other."""
    messages, free = [], 0.0
    for at, nbytes in posted:
        started = max(at, free)
        free = started + wire.all_reduce(nbytes)
        messages.append(Message(at, started, free, nbytes))
    exposed = max(0.0, free - backward.seconds)
    return Forecast(backward.forward + backward.seconds + exposed, exposed, tuple(messages))
