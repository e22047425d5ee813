"""The merged trace is what Perfetto and Chrome expect, and holds what the timelines hold; the chart; GPU kernels."""

import gzip
import json
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from matplotlib import pyplot as plt
from torch.autograd import DeviceType

from scratch_ddp.course.plots import timeline_chart
from scratch_ddp.instruments.timeline import Span, Timeline, timeline, write_trace
from scratch_ddp.instruments.timeline.phases import gpu_spans, kernel_spans
from scratch_ddp.instruments.timeline.spans import lanes
from tests.ranks import RankFailed, run_ranks

TIMELINES = [
    Timeline(
        rank=rank,
        start=100.0 + rank / 1000,
        end=100.5,
        compute=[Span("forward", 100.01, 100.02), Span("backward", 100.02, 100.04)],
        waits=[Span("wait", 100.04, 100.06)],
        communication=[
            Span("all_reduce", 100.03, 100.05, 4000, 100.025),
            Span("all_reduce", 100.045, 100.06, 8, 100.035),
        ],
        operations=[Span("aten::mm", 100.011, 100.015)],
    )
    for rank in range(2)
]


def _read(path):
    data = path.read_bytes()
    return json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)["traceEvents"]


@pytest.mark.parametrize("name", ["step.json", "step.json.gz"])
def test_each_rank_is_a_process_with_its_threads(tmp_path, name):
    write_trace(TIMELINES, tmp_path / name)
    events = _read(tmp_path / name)
    labels = {(each["pid"], each["tid"], each["name"]): each["args"] for each in events if each["ph"] == "M"}
    for rank in range(2):
        assert labels[rank, 0, "process_name"] == {"name": f"rank {rank}"}
        assert labels[rank, 0, "process_sort_index"] == {"sort_index": rank}
        threads = [labels[rank, thread, "thread_name"]["name"] for thread in range(1, 6)]
        assert threads == ["compute", "operations", "waiting", "communication", "communication 2"]
        assert [labels[rank, thread, "thread_sort_index"]["sort_index"] for thread in range(1, 6)] == [1, 2, 3, 4, 5]


def test_slices_have_the_times_and_bytes_of_the_spans_on_one_clock(tmp_path):
    write_trace(TIMELINES, tmp_path / "trace.json")
    events = _read(tmp_path / "trace.json")
    for rank, mine in enumerate(TIMELINES):
        slices = [each for each in events if each["ph"] == "X" and each["pid"] == rank]
        spans = [*mine.compute, *mine.operations, *mine.waits, *mine.communication]
        assert [each["name"] for each in slices] == [span.name for span in spans]
        for each, span in zip(slices, spans, strict=True):
            assert each["ts"] == pytest.approx((span.start - 100.0) * 1e6, abs=0.01)
            assert each["dur"] == pytest.approx((span.end - span.start) * 1e6, abs=0.01)
        assert [each["args"]["bytes"] for each in slices[-2:]] == [4000, 8]
        arrows = [each for each in events if each["ph"] in "sf" and each["pid"] == rank]
        assert [each["ph"] for each in arrows] == ["s", "f", "s", "f"]
        assert arrows[0]["id"] == arrows[1]["id"] != arrows[2]["id"]


def test_lanes_do_not_overlap():
    spans = [Span("a", 0, 4), Span("b", 1, 2), Span("c", 2, 3), Span("d", 4, 5), Span("e", 2.5, 6)]
    assert [[span.name for span in row] for row in lanes(spans)] == [["a", "d"], ["b", "c"], ["e"]]
    assert lanes([]) == [[]]


def test_saved_by_all_ranks_written_once(tmp_path):
    def save():
        with timeline() as mine:
            dist.all_reduce(torch.ones(1000))
        mine.save(tmp_path / "trace.json")
        return mine

    recorded = run_ranks(2, save)
    events = _read(tmp_path / "trace.json")
    for mine in recorded:
        communication = [each for each in events if each["pid"] == mine.rank and each["name"] == "all_reduce"]
        assert [each["args"]["bytes"] for each in communication] == [4000]


def test_a_path_that_cannot_be_written_is_refused_on_every_rank(tmp_path):
    def save():
        with timeline() as mine:
            pass
        mine.save(tmp_path / "nowhere" / "trace.json")

    with pytest.raises(RankFailed) as failed:
        run_ranks(2, save)
    for rank in range(2):
        assert "OSError: rank 0: the trace could not be written" in failed.value.failures[rank]


def test_a_lone_process_saves_its_own(tmp_path):
    with timeline() as mine:
        torch.ones(10)
    mine.save(tmp_path / "trace.json")
    assert {each["pid"] for each in _read(tmp_path / "trace.json")} == {0}


@dataclass
class Event:
    """As much of the profiler's events as is read of a GPU's."""

    called: str
    start: float
    duration: float
    number: int = 0
    cause: int = 0
    device: DeviceType = DeviceType.CUDA

    def __getattr__(self, name):
        values = {
            "name": self.called,
            "start_ns": int(self.start * 1e9),
            "duration_ns": int(self.duration * 1e9),
            "correlation_id": self.number,
            "linked_correlation_id": self.cause,
            "device_type": self.device,
            "is_user_annotation": False,
            "device_resource_id": 7 + ("nccl" in self.called),
        }
        return lambda: values[name]


def test_kernels_are_of_the_kind_of_the_operation_that_began_them():
    compute = [Span("forward", 0.0, 1.0), Span("backward", 1.0, 2.0)]
    events = [
        Event("aten::mm", 0.5, 0.1, number=7, device=DeviceType.CPU),
        Event("aten::mm", 1.5, 0.1, number=8, device=DeviceType.CPU),
        Event("gemm", 1.2, 1.0, cause=7),
        Event("gemm", 2.3, 1.0, cause=8),
        Event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 2.0, 2.0, cause=9),
    ]
    computing, communication = gpu_spans(events, compute, later=0.0)
    assert computing == [Span("forward", 1.2, pytest.approx(2.2)), Span("backward", 2.3, pytest.approx(3.3))]
    assert [(span.start, span.end) for span in communication] == [(2.0, 4.0)]


def test_a_track_for_each_stream(tmp_path):
    events = [Event("aten::mm", 0.5, 0.1, device=DeviceType.CPU), Event("gemm", 1.2, 1.0), Event("ncclSum", 2.0, 2.0)]
    kernels = kernel_spans(events, later=0.0)
    assert [(each.name, each.stream) for each in kernels] == [("gemm", 7), ("ncclSum", 8)]
    write_trace([Timeline(start=0.0, end=5.0, kernels=kernels)], tmp_path / "trace.json")
    events = _read(tmp_path / "trace.json")
    tracks = {each["tid"]: each["args"]["name"] for each in events if each["name"] == "thread_name"}
    slices = {each["name"]: tracks[each["tid"]] for each in events if each["ph"] == "X"}
    assert slices == {"gemm": "stream 7", "ncclSum": "stream 8"}


def test_the_chart_has_two_rows_of_bars_a_rank_and_a_legend_of_what_occurs():
    figure = timeline_chart({"two ranks": TIMELINES, "one": TIMELINES[:1]})
    above, below = figure.axes
    assert [label.get_text() for label in above.get_yticklabels()] == ["rank 0", "rank 1"]
    assert (above.get_title(loc="left"), below.get_title(loc="left")) == ("two ranks", "one")
    assert above.get_xlim() == below.get_xlim() and above.get_xlim()[0] == 0
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    assert texts == ["forward", "backward", "communication, hidden", "exposed"]
    plt.close(figure)
