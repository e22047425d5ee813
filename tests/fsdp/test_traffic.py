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
from tests.ddp.cases import batches, build, shard
from tests.fsdp.cases import CASES
from tests.ranks import run_ranks


def one_step(name: str = "adapters", **settings) -> tuple:
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


def test_one_all_gather_and_one_reduce_scatter_a_unit():
    for calls, sent, apart, elements, block in run_ranks(2, one_step):
        # Three units, the root is one of them. It and the last one stay between forward and backward.
        assert calls == {"all_gather": 3 + 1, "reduce_scatter": 3} and apart == {"all_reduce": 3}
        assert sent == (2 * elements + block) / 2  # (n-1)/n of all twice, of a block once more


def test_units_that_stay_after_forward_are_not_gathered_again():
    for calls, sent, _, elements, _ in run_ranks(2, lambda: one_step(free_after_forward=False)):
        assert calls == {"all_gather": 3, "reduce_scatter": 3} and sent == 2 * elements / 2


def test_a_recomputed_segment_costs_a_reduce_scatter_more_for_each_unit_but_its_first():
    """Its first unit computes again before the others have gradients: they are reduced without them, and once more."""
    for calls, *_ in run_ranks(2, lambda: one_step("segments")):
        assert calls["reduce_scatter"] == 5 + 2


def bytes_on_a_mesh() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 8, bias=False))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    sharded, each = FSDP(model, mesh), 8 * 8 * 4
    with traffic() as counted:
        sharded(torch.ones(1, 8)).sum().backward()
        sharded.sync_gradients()
    assert counted.calls == {"all_gather": 3, "reduce_scatter": 2, "all_reduce": 2}  # the last unit stays for backward
    # Each rank gives a shard to each all-gather and all-reduce, and a whole unit to each reduce-scatter. It sends half
    # of a unit in each of the row's collectives, and a shard in each of the column's.
    assert counted.payload_bytes == (3 + 2) * each // 2 + 2 * each
    assert counted.wire_bytes == (3 + 2 + 2) * each // 2


def test_the_bytes_of_both_groups_of_a_mesh_are_counted():
    run_ranks(4, bytes_on_a_mesh)


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
