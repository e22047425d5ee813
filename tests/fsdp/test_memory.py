"""What a sharded model holds, by the allocator's count: its share between steps, a few units while it computes."""

import gc
import time

import pytest
import torch
from torch import nn

from scratch_ddp.fsdp import FSDP
from scratch_ddp.instruments.memory.use import memory_use
from tests.ranks import run_ranks

WIDTH, BLOCKS = 256, 16
BLOCK = 4 * WIDTH * WIDTH  # bytes: 256 KiB
MODEL = BLOCKS * BLOCK


def build() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS)))


def measure(wrap, optimizer_class=torch.optim.SGD) -> tuple[float, float]:
    """Bytes held between steps, and at the peak of a step, in sizes of the model."""
    x = torch.randn(2, WIDTH)
    gc.collect()  # a model measured before must not be freed inside the block
    with memory_use() as until_then:
        model = wrap(build())
        optimizer = optimizer_class(model.parameters(), lr=1e-3)

        def step() -> None:
            model(x).sum().backward()
            if isinstance(model, FSDP):
                model.sync_gradients()
            optimizer.step()
            optimizer.zero_grad()

        step(), step()
        gc.collect()
    with memory_use() as one_step:
        step()
    return until_then.kept_bytes / MODEL, (until_then.kept_bytes + one_step.peak_bytes) / MODEL


@pytest.mark.parametrize("world_size", [2, 4])
def test_between_steps_a_rank_holds_its_share(world_size):
    """And at the peak parameters and gradients in shards, and a few units: one whole and its gradients, messages."""
    for kept, peak in run_ranks(world_size, measure, FSDP):
        assert kept == pytest.approx(1 / world_size, abs=0.02)
        assert 2 / world_size < peak < 2 / world_size + 8 / BLOCKS
    for kept, _ in run_ranks(world_size, measure, FSDP, torch.optim.Adam):
        assert kept == pytest.approx(3 / world_size, abs=0.02)


def wrapping(on_meta: bool) -> tuple[float, float]:
    model = build() if not on_meta else None
    with torch.device("meta"):
        model = model or build()
    torch.manual_seed(0)
    with memory_use() as used:
        sharded = FSDP(model)
        time.sleep(0.2)  # gloo's own thread lets go of the last message a moment after the call is over
    assert sharded.module is model
    return used.kept_bytes / MODEL, used.peak_bytes / MODEL


def test_wrapping_frees_the_model_unit_by_unit_and_on_the_meta_device_it_is_never_there():
    for kept, peak in run_ranks(2, wrapping, False):
        assert kept == pytest.approx(-0.5, abs=0.02)  # all of it was there before
        assert peak < 3.1 / BLOCKS
    for kept, peak in run_ranks(4, wrapping, True):
        assert kept == pytest.approx(0.25, abs=0.02) and peak < 0.25 + 3.1 / BLOCKS


def without_synchronisation() -> tuple[float, float]:
    model, x = FSDP(build()), torch.randn(2, WIDTH)
    time.sleep(0.2)
    with memory_use() as used, model.no_sync():
        model(x).sum().backward()
        time.sleep(0.2)
    with memory_use() as more:
        model(x).sum().backward()
        model.sync_gradients()
        time.sleep(0.2)
    return used.kept_bytes / MODEL, more.kept_bytes / MODEL


def test_no_sync_keeps_whole_gradients_until_the_next_synchronisation():
    for accumulated, afterwards in run_ranks(2, without_synchronisation):
        assert accumulated == pytest.approx(1, abs=0.05) and afterwards == pytest.approx(-0.5, abs=0.05)
