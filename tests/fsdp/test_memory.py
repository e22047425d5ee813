"""What a sharded model holds, by the allocator's count: its share between steps, a few units while it computes."""

import gc
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.fsdp import FSDP
from scratch_ddp.instruments.memory.use import memory_use
from tests.ranks import in_turn

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


def shares(optimizer_class, copies: int) -> None:
    """Between steps a rank holds its share of `copies` of the model. At the peak parameters and gradients in shards,
    and a few units: one whole and its gradients, messages."""
    n = dist.get_world_size()
    kept, peak = measure(FSDP, optimizer_class)
    assert kept == pytest.approx(copies / n, abs=0.02)
    assert copies > 1 or 2 / n < peak < 2 / n + 8 / BLOCKS


def wrapping(on_meta: bool) -> None:
    """The model is freed unit by unit; on the meta device it is never there."""
    share, model = 1 / dist.get_world_size(), build() if not on_meta else None
    with torch.device("meta"):
        model = model or build()
    with memory_use() as used:
        sharded = FSDP(model)
        time.sleep(0.2)  # gloo's own thread lets go of the last message a moment after the call is over
    assert sharded.module is model
    there_before = 0 if on_meta else 1
    assert used.kept_bytes / MODEL == pytest.approx(share - there_before, abs=0.02)
    assert used.peak_bytes / MODEL < (share if on_meta else 0) + 8 / BLOCKS  # on a busy machine gloo's thread is late


MEASURED = {
    2: [(shares, torch.optim.SGD, 1), (shares, torch.optim.Adam, 3), (wrapping, False)],
    4: [(shares, torch.optim.SGD, 1), (wrapping, True)],
}


@pytest.mark.parametrize("world_size", MEASURED)
def test_what_a_rank_holds(world_size):
    in_turn(world_size, lambda check, *args: check(*args), MEASURED[world_size])
