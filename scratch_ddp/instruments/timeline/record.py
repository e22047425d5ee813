"""`timeline`: record what this rank computes and communicates, by torch's profiler and the simulated link.

The profiler does not record when the main thread waits for a collective or a message: `traffic` notes it, in
`Work.wait()`, where each synchronous call ends too. Waits of torch's DistributedDataParallel inside C++ are not seen.
"""

import contextlib
import itertools
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import DeviceType

from scratch_ddp.instruments.intervals import Interval, union
from scratch_ddp.instruments.profiler import recording
from scratch_ddp.instruments.timeline.call_sites import call_sites_recorded
from scratch_ddp.instruments.timeline.phases import compute_spans, gpu_spans, is_kernel, span_of
from scratch_ddp.instruments.timeline.spans import Span, Timeline
from scratch_ddp.instruments.traffic.watch import waits_recorded

_MARK = "scratch_ddp.instruments.timeline"
_GLOO_DELAY = 0.02  # seconds: a gloo thread records the end of its work shortly after the waiting thread continues


@contextlib.contextmanager
def timeline(group: dist.ProcessGroup | None = None, call_sites: bool = False) -> Iterator[Timeline]:
    """Record this rank's timeline inside the block; it is filled when the block ends.

    The ranks of `group` (default: the default group) start together, so each of them must open a block.

    Communication is what the simulated link carried if `group` is on one. Otherwise it is what gloo ran, or on a GPU,
    NCCL's kernels. Computing is recorded in the thread that opens the block and in the backward passes that it starts.
    On a GPU it is the kernels, except on a simulated link. With `call_sites`, the lines of your own code that the
    thread is at are recorded, too (see `by_call_site`). Costs a barrier, which is not recorded. Raises RuntimeError
    where torch's profiler is on already.
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
        before = next(reversed(getattr(group, "transfers", [])), None)
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


def _fill(recorded: Timeline, events: list[Any], waits: list[Interval], group: Any, before: Any) -> None:
    """`before`: the last transfer on the link before the block."""
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
        carried = itertools.takewhile(lambda each: each is not before, reversed(group.transfers))
        spans = [Span(each.call, each.started, each.ended, each.nbytes, each.posted) for each in carried]
        recorded.communication = spans[::-1]  # where nobody has waited, the end is a forecast
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
