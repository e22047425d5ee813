"""`timeline`: record what this rank computes and communicates, by torch's profiler and the simulated link.

torch names what it runs: backward is the autograd engine's `evaluate_function`, and optimizers have events of their
own. An operation outside both is forward if a backward comes next, and "other" if not. The profiler does not record
when the main thread waits: `traffic` notes it, in `Work.wait()`. Waits inside C++, as of torch's DDP, are not seen.
"""

import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import DeviceType

from scratch_ddp.instruments.timeline.breakdown import call_sites_recorded
from scratch_ddp.instruments.timeline.spans import COMPUTING, Interval, Span, Timeline, union, without
from scratch_ddp.instruments.traffic.calls import waits_recorded

_MARK = "scratch_ddp.instruments.timeline"
_GLOO_DELAY = 0.02  # seconds: a gloo thread records the end of its work shortly after the waiting thread continues
_PAUSE = 3e-3  # seconds: a shorter gap between two operations of one phase is due to Python or another program
_UNDECIDED = "operation"  # the phase of an operation until the next phase is known
_CALL = "call"  # of a collective: not computing


@contextlib.contextmanager
def timeline(group: dist.ProcessGroup | None = None, call_sites: bool = False) -> Iterator[Timeline]:
    """Record this rank's timeline inside the block; it is filled when the block ends.

    The ranks of `group` (default: the default group) start together, so each of them must open a block.

    Communication is what the simulated link carried if `group` is on one. Otherwise it is what gloo ran, or on a GPU,
    NCCL's kernels. Computing is recorded in the thread that opens the block and in the backward passes that it starts.
    On a GPU it is the kernels, except on a simulated link. With `call_sites`, the lines of your own code that the
    thread is at are recorded, too (see `by_call_site`). Costs a barrier. Raises RuntimeError under another profiler.
    """
    group = group or (dist.group.WORLD if dist.is_initialized() else None)
    recorded = Timeline(rank=dist.get_rank() if dist.is_initialized() else group.rank() if group else 0)
    with contextlib.ExitStack() as stack:
        profile = stack.enter_context(recording())
        if group is not None:
            dist.barrier(group=group)
        waits = stack.enter_context(waits_recorded())
        with torch.profiler.record_function(_MARK):
            pass  # marks which thread is ours
        sites = stack.enter_context(call_sites_recorded()) if call_sites else []
        before = len(getattr(group, "transfers", []))
        recorded.start = time.monotonic()
        try:
            yield recorded
        finally:
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            recorded.end = time.monotonic()
            time.sleep(_GLOO_DELAY)
            stack.close()
            recorded.sites = list(sites)
            _fill(recorded, profile.profiler.kineto_results.events(), waits, group, before)


@contextlib.contextmanager
def recording(**options: bool) -> Iterator[torch.profiler.profile]:
    """Record what torch does on this thread and a GPU in use. Raises RuntimeError if a profiler is on already."""
    if torch.autograd._profiler_enabled():
        raise RuntimeError("torch's profiler is on already, and a thread has only one: end the other block first")
    on_gpu = [torch.profiler.ProfilerActivity.CUDA] if torch.cuda.is_initialized() else []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU, *on_gpu], **options) as recorded:
        yield recorded


def _fill(recorded: Timeline, events: list[Any], waits: list[Interval], group: Any, before: int) -> None:
    """`before`: how many transfers the link had carried before the block."""
    # The profiler counts from 1970. The smallest of some differences is the one that nothing came between.
    later = min(-time.monotonic() + time.time() for _ in range(20))
    thread = next(event for event in events if event.name() == _MARK).start_thread_id()
    events = [event for event in events if event.start_ns() / 1e9 - later >= recorded.start]  # not our own barrier's
    own = [event for event in events if event.device_type() == DeviceType.CPU and _is_ours(event, thread)]
    waits = union(waits)  # one group's wait lies inside another's
    recorded.waits = [Span("wait", *wait) for wait in waits]
    recorded.compute = compute_spans(own, waits, later)
    recorded.operations = [span_of(event, later) for event in own]
    recorded.kernels = [span_of(event, later) for event in events if is_kernel(event)]
    if getattr(group, "link", None) is not None:
        sent = group.transfers[before:]  # where nobody has waited, the end is a forecast
        recorded.communication = [Span(each.call, each.started, each.ended, each.nbytes, each.posted) for each in sent]
        return
    recorded.communication = [span_of(event, later) for event in events if event.name().startswith("gloo:")]
    computing, communication = gpu_spans(events, recorded.compute, later)
    if computing:
        recorded.compute, recorded.communication = computing, communication


def _is_ours(event: Any, thread: int) -> bool:
    """Whether it is of the block's thread, or of a backward that autograd runs in a thread for a GPU."""
    if event.name().startswith("gloo:") or event.is_async():
        return False
    return event.start_thread_id() == thread or event.name().startswith("autograd::engine::evaluate_function")


def span_of(event: Any, later: float) -> Span:
    """A profiler's event (`_KinetoEvent`), whose clock is `later` seconds ahead. A GPU's has its stream."""
    start = event.start_ns() / 1e9 - later
    stream = event.device_resource_id() if event.device_type() == DeviceType.CUDA else None
    return Span(event.name().removeprefix("gloo:"), start, start + event.duration_ns() / 1e9, stream=stream)


def compute_spans(events: Sequence[Any], waits: Sequence[Interval], later: float) -> list[Span]:
    """The computing of one thread, without `waits`. A range with a name from COMPUTING is that phase."""
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
