"""From the profiler's events of one rank to what it was doing: forward, backward, optimizer, communication.

torch names what it runs: backward is the autograd engine's `evaluate_function`, the optimizer's step and zero_grad
have events of their own. An operation outside of both is forward if a backward comes next, else "other": what a
strategy copies and divides after backward.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from torch.autograd import DeviceType

from scratch_ddp.instruments.timeline.spans import COMPUTING, Interval, Span, without

_JOINED = 3e-3  # seconds: a shorter pause between two operations of one kind is Python's, or another program's
_UNDECIDED = "operation"  # its kind until it is known what comes next
_CALL = "call"  # of a collective: not computing
_BYTES = {
    **dict.fromkeys(("double", "long int", "c10::complex<float>"), 8),
    **dict.fromkeys(("float", "int"), 4),
    **dict.fromkeys(("c10::Half", "c10::BFloat16", "short int"), 2),
    **dict.fromkeys(("unsigned char", "signed char", "bool"), 1),
}


def compute_spans(events: Iterable[Any], waits: Sequence[Interval], later: float) -> list[Span]:
    """The computing of one thread: `events` of the profiler (`_KinetoEvent`), which begin `later` seconds too late.

    `waits` are cut out. A range named by `torch.profiler.record_function("forward")`, or with another name of
    COMPUTING, is what its name says.
    """
    spans = _decided(list(_outermost(events, later)))
    cut = [Span(span.name, *left) for span in spans for left in without([(span.start, span.end)], waits)]
    return _joined(cut, waits)


def collective_spans(events: Iterable[Any], later: float) -> list[Span]:
    """The collectives and messages that gloo carried out: from when a thread of gloo took one up until it was done."""
    return [
        Span(event.name().removeprefix("gloo:"), *_interval(event, later), nbytes=_payload(event))
        for event in events
        if event.name().startswith("gloo:")
    ]


def gpu_spans(events: Sequence[Any], compute: Sequence[Span], later: float) -> tuple[list[Span], list[Span]]:
    """The kernels of a GPU as (computing, communication): each kernel is of the kind of the operation that began it."""
    kernels = [event for event in events if event.device_type() == DeviceType.CUDA and not event.is_user_annotation()]
    began = {event.correlation_id(): event for event in events if event.device_type() == DeviceType.CPU}
    computing, communication = [], []
    for kernel in kernels:
        interval = _interval(kernel, later)
        if "nccl" in kernel.name().lower():
            communication.append(Span(kernel.name(), *interval))
            continue
        operation = began.get(kernel.linked_correlation_id())
        at = _interval(operation, later)[0] if operation is not None else interval[0]
        kind = next((span.name for span in compute if span.start <= at <= span.end), "other")
        computing.append(Span(kind, *interval))
    return _joined(sorted(computing, key=lambda span: span.start), []), communication


def operation_spans(events: Iterable[Any], later: float) -> list[Span]:
    """Every operation and named range, for the trace."""
    return [Span(event.name(), *_interval(event, later)) for event in events]


def _outermost(events: Iterable[Any], later: float) -> Iterable[Span]:
    """The events that lie in no other, in their order, by their kind. What is in a range of unknown name counts."""
    inside_until = float("-inf")
    for event in sorted(events, key=lambda each: (each.start_ns(), -each.duration_ns())):
        start, end = _interval(event, later)
        kind = _kind(event)
        if start >= inside_until and kind is not None:
            inside_until = end
            yield Span(kind, start, end)


def _kind(event: Any) -> str | None:
    """What an event says of itself; None for a range that only holds others."""
    name = event.name()
    if name.startswith("autograd::engine::evaluate_function"):
        return "backward"
    if name.startswith("Optimizer."):
        return "optimizer"
    if name.startswith("c10d::"):
        return _CALL
    if event.is_user_annotation():
        return name if name in COMPUTING else None
    return _UNDECIDED


def _decided(spans: list[Span]) -> list[Span]:
    """Make each undecided span "forward" or "other", by what comes next; drop calls of collectives."""
    coming, decided = "other", []
    for span in reversed(spans):
        if span.name == _UNDECIDED:
            span = Span("forward" if coming == "backward" else "other", span.start, span.end)
        elif span.name == _CALL:
            continue
        else:
            coming = span.name
        decided.append(span)
    return decided[::-1]


def _joined(spans: Iterable[Span], waits: Sequence[Interval]) -> list[Span]:
    """Make one of spans of a kind between which nothing else happened but a moment of Python."""
    joined: list[Span] = []
    for span in spans:
        if joined and _go_on(joined[-1], span, waits):
            joined[-1] = Span(span.name, joined[-1].start, max(joined[-1].end, span.end))
        else:
            joined.append(span)
    return joined


def _go_on(before: Span, after: Span, waits: Sequence[Interval]) -> bool:
    if before.name != after.name or after.start - before.end >= _JOINED:
        return False
    return not any(before.end <= start and end <= after.start for start, end in waits)


def _interval(event: Any, later: float) -> Interval:
    start = event.start_ns() / 1e9 - later
    return start, start + event.duration_ns() / 1e9


def _payload(event: Any) -> int:
    """Bytes of the tensors that a collective was given; 0 where the profiler does not say."""
    nbytes = 0
    for shape, dtype in zip(event.shapes(), event.dtypes(), strict=False):
        elements = 1
        for length in shape:
            elements *= length
        nbytes += elements * _BYTES.get(dtype, 0)
    return nbytes
