"""What a step costs: messages and bytes, activations held, and the bubble, all as the schedule says."""

import torch
import torch.distributed as dist

from scratch_ddp.course.pages.sleeping import LiveActivations, SleepingStage
from scratch_ddp.instruments.traffic import traffic
from scratch_ddp.pipeline import held
from scratch_ddp.pipeline.execute import execute
from scratch_ddp.pipeline.module import SCHEDULES
from scratch_ddp.pipeline.simulate import homes
from tests.pipeline.cases import WIDTH, batch, build, pipeline_of
from tests.ranks import in_turn


def expected_messages(rows, kinds: str) -> tuple[int, int]:
    """How many messages this rank sends and receives: every hand-over to a stage of another rank."""
    home, rank = homes(rows), dist.get_rank()
    sent = received = 0
    for kind, stage, _ in (action for row in rows for action in row if action.kind in kinds):
        to = home.get(stage + 1 if kind == "F" else stage - 1) if kind != "W" else None
        if to is not None and to != home[stage]:
            sent += home[stage] == rank
            received += to == rank
    return sent, received


def exact_traffic(name: str) -> None:
    p = dist.get_world_size()
    m, items, rows = 2 * p, 5 * p + 1, SCHEDULES[name](p, 2 * p)
    pipeline, (x, y) = pipeline_of(build(), m, name), batch(items)
    (sent, received), (forwards, _) = expected_messages(rows, "FBI"), expected_messages(rows, "F")
    for headers in (forwards, 0):
        with traffic() as counted:
            pipeline.step(x, y)
        assert counted.calls == {"send": sent, "recv": received}
        # All micro-batches together have `items` items, and each stage passes each micro-batch on.
        assert counted.bytes_sent == sent // m * items * 3 * WIDTH * 8
        assert counted.setup.messages == headers and counted.setup.bytes_sent == 80 * headers
        assert counted.setup.calls["all_reduce"] == 2  # before and after
    with torch.no_grad():
        pipeline.step(x, y)
        with traffic() as counted:
            pipeline.step(x, y, everywhere=True)
    calls = {"send": forwards, "recv": expected_messages(rows, "F")[1], "broadcast": 1}
    assert counted.calls == {call: times for call, times in calls.items() if times}


def test_messages_and_bytes():
    in_turn(4, exact_traffic, [(name,) for name in SCHEDULES])


def activations_held(name: str) -> None:
    """At most, in two passes of this rank's row."""
    rows, live, rank = SCHEDULES[name](4, 8), LiveActivations(), dist.get_rank()
    stages = {stage: SleepingStage(0.0, live=live) for stage, home in homes(rows).items() if home == rank}
    for _ in range(2):
        execute(rows, stages, [torch.ones(1, 4)] * 8, lambda _, y: y.sum())
        assert live.now == 0
    assert live.most == held(rows[rank])


def test_activations_held():
    in_turn(4, activations_held, [(name,) for name in SCHEDULES])
