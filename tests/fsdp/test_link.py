"""On a simulated network: the bytes that sharding needs, and messages that travel while units compute."""

import pytest
import torch
import torch.distributed as dist

from scratch_ddp.course.pages.sleeping import SleepingBlocks
from scratch_ddp.fsdp import FSDP
from scratch_ddp.instruments.network import Link, lone_rank


@pytest.fixture
def alone():
    """One process that stands for a rank of four; a second for all bytes of a model of 1 MB."""
    yield lone_rank(4, Link(0, 1 / 2**20))
    dist.destroy_process_group()


def test_what_a_rank_of_four_sends(alone):
    blocks = SleepingBlocks(count=4, nbytes=2**20, forward=0.0, backward=0.0)
    sharded = FSDP(blocks, units=[*blocks.blocks])
    alone.link = Link(0, 1e-12)
    sharded().backward()
    sharded.sync_gradients()
    sharded.zero_grad()
    alone.transfers.clear()
    sharded().backward()
    sharded.sync_gradients()
    whole = 2**20
    large = [each for each in alone.transfers if each.nbytes > 10_000]
    assert [each.call for each in large].count("all_gather") == 4 + 3  # the last block stays for backward
    assert [each.call for each in large].count("reduce_scatter") == 4
    assert sum(each.nbytes for each in large) == pytest.approx(3 / 4 * (2 * whole + 3 / 4 * whole), rel=0.01)
    average = sharded.gather_full_grads()["blocks.0.weight"]
    assert torch.equal(average, torch.ones_like(average))  # the mean of equal gradients


def seconds_of_a_step(group, prefetch: int) -> float:
    """On a link that is busy for 0.21 s a step, beside 0.3 s of computing; in seconds."""
    import time

    blocks = SleepingBlocks(count=6, nbytes=2**20, forward=0.1, backward=0.2)
    sharded = FSDP(blocks, units=[*blocks.blocks], prefetch=prefetch)
    group.link = Link(0, 0.1 / 2**20)
    for _ in range(2):
        began = time.perf_counter()
        sharded().backward()
        sharded.sync_gradients()
    return time.perf_counter() - began


@pytest.mark.measures_time
def test_messages_travel_while_units_compute(alone):
    hidden, exposed = (seconds_of_a_step(alone, prefetch) for prefetch in (1, 0))
    assert hidden < 0.8 * exposed, f"{hidden:.3f} s with prefetch, {exposed:.3f} s without"
