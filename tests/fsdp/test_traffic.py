"""What travels in a step: no more than what sharding needs, and while units compute."""

import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from scratch_ddp.course.pages.sleeping import SleepingBlocks
from scratch_ddp.fsdp import FSDP
from scratch_ddp.instruments.network import Link, lone_rank
from scratch_ddp.instruments.traffic import traffic
from tests.ddp.cases import batches, build, linear, shard
from tests.fsdp.cases import CASES, with_head
from tests.ranks import in_turn, run_ranks


def one_step(name: str, **settings) -> tuple:
    case, world_size = CASES[name], dist.get_world_size()
    model = build(case).requires_grad_(True)
    elements, block = (sum(each.numel() for each in part.parameters()) for part in (model, model.blocks[0]))
    sharded = FSDP(model, **settings)
    x, y = batches(1, world_size)[0]
    for _ in range(2):
        with traffic() as counted:
            case.loss(sharded, shard(x, dist.get_rank()), shard(y, dist.get_rank())).backward()
            sharded.sync_gradients()
    return counted.calls, counted.wire_bytes / 8, counted.setup.calls, elements, block


def calls_and_bytes() -> None:
    calls, sent, apart, elements, block = one_step("adapters")
    # Three units, the root is one of them. It and the last one stay between forward and backward.
    assert calls == {"all_gather": 3 + 1, "reduce_scatter": 3} and apart == {"all_reduce": 3}
    assert sent == (2 * elements + block) / 2  # (n-1)/n of all twice, of a block once more
    calls, sent, _, elements, _ = one_step("adapters", free_after_forward=False)
    assert calls == {"all_gather": 3, "reduce_scatter": 3} and sent == 2 * elements / 2
    # The first unit of a segment computes again before the others have gradients: they are reduced without them, and
    # once more.
    assert one_step("segments")[0]["reduce_scatter"] == 5 + 2
    alone = FSDP(build(CASES["mlp"]))
    with traffic() as counted, alone.no_sync():
        alone(torch.ones(1, 6).double()).sum().backward()
        alone.sync_gradients()
    assert "reduce_scatter" not in counted.calls


def frozen_backbone() -> None:
    """Backward gathers no unit that it does not need: of frozen blocks, or but for one trained block of three."""
    # Of itself; the last one stays gathered after forward.
    for trained, gathered in (("last", {}), ("blocks.1", {"all_gather": 1})):
        model = with_head(*linear(3)).requires_grad_(False)
        model.get_submodule(trained).requires_grad_(True)
        sharded = FSDP(model)
        loss = sharded(torch.ones(2, 6)).sum()
        with traffic() as counted:
            loss.backward()
            sharded.sync_gradients()
        assert counted.calls == gathered | {"reduce_scatter": 1}


def test_what_travels_in_a_step():
    in_turn(2, lambda check: check(), [(calls_and_bytes,), (frozen_backbone,)])


def on_a_mesh() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    sharded = FSDP(torch.nn.Sequential(*linear(2)), mesh)
    with traffic() as counted:
        sharded(torch.ones(1, 6)).sum().backward()
        sharded.sync_gradients()
    assert counted.calls == {"all_gather": 3, "reduce_scatter": 2, "all_reduce": 2}  # the last unit stays for backward


def test_what_travels_on_a_mesh():
    run_ranks(4, on_a_mesh)


def seconds_of_a_step(group, prefetch: int) -> float:
    """On a link that is busy for 0.21 s a step, beside 0.3 s of computing; in seconds."""
    blocks = SleepingBlocks(count=6, nbytes=2**20, forward=0.1, backward=0.2)
    sharded = FSDP(blocks, units=[*blocks.blocks], prefetch=prefetch)
    group.link = Link(0, 0.1 / 2**20)
    for _ in range(2):
        began = time.perf_counter()
        sharded().backward()
        sharded.sync_gradients()
    return time.perf_counter() - began


@pytest.mark.measures_time
def test_messages_travel_while_units_compute():
    group = lone_rank(4, Link(0, 1 / 2**20))  # one process that stands for a rank of four
    hidden, exposed = (seconds_of_a_step(group, prefetch) for prefetch in (1, 0))
    dist.destroy_process_group()
    assert hidden < 0.8 * exposed, f"{hidden:.3f} s with prefetch, {exposed:.3f} s without"
