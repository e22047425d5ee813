"""From the profiler's events of one rank to its phases: forward, backward, optimizer, communication.

torch names what it runs: backward is the autograd engine's `evaluate_function`, and the optimizer's step and zero_grad
have events of their own. An operation outside both is forward if a backward comes next. Otherwise it is "other", such
as the copies and divisions of a strategy after backward.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from torch.autograd import DeviceType

from scratch_ddp.instruments.intervals import Interval, without
from scratch_ddp.instruments.timeline.spans import COMPUTING, Span

_PAUSE = 3e-3  # seconds: a shorter gap between two operations of one phase is due to Python or another program
_UNDECIDED = "operation"  # the phase of an operation until the next phase is known
_CALL = "call"  # of a collective: not computing
_BYTES = {
    **dict.fromkeys(("double", "long int", "c10::complex<float>"), 8),
    **dict.fromkeys(("float", "int"), 4),
    **dict.fromkeys(("c10::Half", "c10::BFloat16", "short int"), 2),
    **dict.fromkeys(("unsigned char", "signed char", "bool"), 1),
}


def compute_spans(events: Iterable[Any], waits: Sequence[Interval], later: float) -> list[Span]:
    """The computing of one thread, from the profiler's `events` (`_KinetoEvent`), whose clock is `later` seconds ahead.

    `waits` are cut out. A range named by `torch.profiler.record_function("forward")`, or by another name from
    COMPUTING, is that phase.
    """
    spans = _decided(list(_outermost(events, later)))
    cut = [Span(span.name, *left) for span in spans for left in without([span.interval], waits)]
    return _joined(cut, waits)


def collective_spans(events: Iterable[Any], later: float) -> list[Span]:
    """The collectives and messages that gloo ran, from when a gloo thread took each up until it was done."""
    return [
        Span(event.name().removeprefix("gloo:"), *_interval(event, later), nbytes=_payload(event))
        for event in events
        if event.name().startswith("gloo:")
    ]


def gpu_spans(events: Sequence[Any], compute: Sequence[Span], later: float) -> tuple[list[Span], list[Span]]:
    """A GPU's kernels as (computing, communication). Each kernel has the phase of the operation that launched it."""
    kernels = [event for event in events if event.device_type() == DeviceType.CUDA and not event.is_user_annotation()]
    launched_by = {event.correlation_id(): event for event in events if event.device_type() == DeviceType.CPU}
    computing, communication = [], []
    for kernel in kernels:
        interval = _interval(kernel, later)
        if "nccl" in kernel.name().lower():
            communication.append(Span(kernel.name(), *interval))
            continue
        operation = launched_by.get(kernel.linked_correlation_id())
        at = _interval(operation, later)[0] if operation is not None else interval[0]
        phase = next((span.name for span in compute if span.start <= at <= span.end), "other")
        computing.append(Span(phase, *interval))
    return _joined(sorted(computing, key=lambda span: span.start), []), communication


def kernel_spans(events: Iterable[Any], later: float) -> list[Span]:
    """A GPU's kernels and copies, each with its stream."""
    return [
        Span(event.name(), *_interval(event, later), stream=event.device_resource_id())
        for event in events
        if event.device_type() == DeviceType.CUDA and not event.is_user_annotation()
    ]


def operation_spans(events: Iterable[Any], later: float) -> list[Span]:
    """Every operation and named range, for the trace."""
    return [Span(event.name(), *_interval(event, later)) for event in events]


def _outermost(events: Iterable[Any], later: float) -> Iterable[Span]:
    """The events that lie in no other event, in order, by phase. Ranges with unknown names are passed over."""
    inside_until = float("-inf")
    for event in sorted(events, key=lambda each: (each.start_ns(), -each.duration_ns())):
        start, end = _interval(event, later)
        phase = _phase(event)
        if start >= inside_until and phase is not None:
            inside_until = end
            yield Span(phase, start, end)


def _phase(event: Any) -> str | None:
    """The phase that an event itself tells; None for a range that only contains others."""
    name = event.name()
    if name.startswith("autograd::engine::evaluate_function"):
        return "backward"
    if name.startswith("Optimizer."):
        return "optimizer"
    if name.startswith("c10d::"):
        return _CALL
    if event.is_user_annotation():
        if name.startswith("enumerate(DataLoader)"):  # torch's own name for the next batch
            return "data"
        return name if name in COMPUTING else None
    return _UNDECIDED


def _decided(spans: list[Span]) -> list[Span]:
    """Make each undecided span "forward" or "other", by the phase that comes next; drop calls of collectives."""
    following, decided = "other", []
    for span in reversed(spans):
        if span.name == _UNDECIDED:
            span = Span("forward" if following == "backward" else "other", *span.interval)
        elif span.name == _CALL:
            continue
        else:
            following = span.name
        decided.append(span)
    return decided[::-1]


def _joined(spans: Iterable[Span], waits: Sequence[Interval]) -> list[Span]:
    """Join spans of one phase that are separated by a short pause alone."""
    joined: list[Span] = []
    for span in spans:
        if joined and _continues(joined[-1], span, waits):
            joined[-1] = Span(span.name, joined[-1].start, max(joined[-1].end, span.end))
        else:
            joined.append(span)
    return joined


def _continues(before: Span, after: Span, waits: Sequence[Interval]) -> bool:
    if before.name != after.name or after.start - before.end >= _PAUSE:
        return False
    return not any(before.end <= start and end <= after.start for start, end in waits)


def _interval(event: Any, later: float) -> Interval:
    start = event.start_ns() / 1e9 - later
    return start, start + event.duration_ns() / 1e9


def _payload(event: Any) -> int:
    """Bytes of a collective's input tensors; 0 where the profiler does not record them."""
    nbytes = 0
    for shape, dtype in zip(event.shapes(), event.dtypes(), strict=False):
        nbytes += math.prod(shape) * _BYTES.get(dtype, 0)
    return nbytes
