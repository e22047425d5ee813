"""From the profiler's events of one rank to its phases: forward, backward, optimizer, communication.

torch names what it runs: backward is the autograd engine's `evaluate_function`, and optimizers have events of their
own. An operation outside both is forward if a backward comes next, and "other" if not.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from torch.autograd import DeviceType

from scratch_ddp.instruments.intervals import Interval, without
from scratch_ddp.instruments.timeline.spans import COMPUTING, Span

_PAUSE = 3e-3  # seconds: a shorter gap between two operations of one phase is due to Python or another program
_UNDECIDED = "operation"  # the phase of an operation until the next phase is known
_CALL = "call"  # of a collective: not computing


def span_of(event: Any, later: float) -> Span:
    """A profiler's event (`_KinetoEvent`), whose clock is `later` seconds ahead. A GPU's has its stream."""
    start = event.start_ns() / 1e9 - later
    stream = event.device_resource_id() if event.device_type() == DeviceType.CUDA else None
    return Span(event.name().removeprefix("gloo:"), start, start + event.duration_ns() / 1e9, stream=stream)


def compute_spans(events: Sequence[Any], waits: Sequence[Interval], later: float) -> list[Span]:
    """The computing of one thread, from its events, without `waits`. A range with a name from COMPUTING is that phase."""
    outermost: list[Span] = []
    for event in sorted(events, key=lambda each: (each.start_ns(), -each.duration_ns())):
        span, phase = span_of(event, later), _phase(event)
        if phase is not None and (not outermost or span.start >= outermost[-1].end):
            outermost.append(Span(phase, *span.interval))
    following, decided = "other", []
    for span in reversed([span for span in outermost if span.name != _CALL]):
        if span.name == _UNDECIDED:
            span = Span("forward" if following == "backward" else "other", *span.interval)
        else:
            following = span.name
        decided.append(span)
    spans = [Span(span.name, *left) for span in reversed(decided) for left in without([span.interval], waits)]
    return _joined(spans, waits)


def gpu_spans(events: Sequence[Any], compute: Sequence[Span], later: float) -> tuple[list[Span], list[Span]]:
    """A GPU's kernels as (computing, communication). Each kernel has the phase of the operation that launched it."""
    launched_by = {event.correlation_id(): event for event in events if event.device_type() == DeviceType.CPU}
    computing, communication = [], []
    for event in filter(is_kernel, events):
        kernel = span_of(event, later)
        if "nccl" in kernel.name.lower():
            communication.append(kernel)
        else:
            at = span_of(launched_by.get(event.linked_correlation_id(), event), later).start
            phase = next((span.name for span in compute if span.start <= at <= span.end), "other")
            computing.append(Span(phase, *kernel.interval))
    return _joined(sorted(computing, key=lambda span: span.start), []), communication


def is_kernel(event: Any) -> bool:
    """Whether it is a kernel or a copy of a GPU."""
    return event.device_type() == DeviceType.CUDA and not event.is_user_annotation()


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


def _joined(spans: Iterable[Span], waits: Sequence[Interval]) -> list[Span]:
    """Join spans of one phase that are separated by a short pause alone, without a wait in it."""
    joined: list[Span] = []
    for span in spans:
        last = joined[-1] if joined else span
        waited = any(last.end <= start and end <= span.start for start, end in waits)
        if joined and span.name == last.name and span.start - last.end < _PAUSE and not waited:
            joined[-1] = Span(span.name, last.start, max(last.end, span.end))
        else:
            joined.append(span)
    return joined
