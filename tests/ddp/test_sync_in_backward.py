"""`sync="backward"`: gradients are synchronised when backward ends, without a call, as torch's classes do it."""

import contextlib
import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp import FSDP
from tests.ddp.cases import HOOKED, batches, mlp, shard
from tests.ranks import run_ranks

WRAPPERS = {**HOOKED, "FSDP": FSDP}
each_wrapper = pytest.mark.parametrize("name", WRAPPERS)


def same_mlp() -> nn.Module:
    torch.manual_seed(0)
    return mlp().double()


def loss(model: nn.Module, batch: tuple, part) -> torch.Tensor:
    x, y = map(part, batch)
    return nn.functional.mse_loss(model(x), y)


def train(model: nn.Module, part) -> None:
    """A step of one backward, one that accumulates under no_sync, and one of two backward passes, each synchronised."""
    optimizer, no_sync = (
        torch.optim.AdamW(model.parameters(), lr=0.01),
        getattr(model, "no_sync", contextlib.nullcontext),
    )
    data = batches(5, dist.get_world_size())
    for micro_batches, quiet in ((data[:1], no_sync), (data[1:3], no_sync), (data[3:], contextlib.nullcontext)):
        for batch in micro_batches:
            with contextlib.nullcontext() if batch is micro_batches[-1] else quiet():
                loss(model, batch, part).backward()
        optimizer.step()
        optimizer.zero_grad()


def compare_with_one_process(name: str) -> None:
    model, alone = WRAPPERS[name](same_mlp(), sync="backward"), same_mlp()
    train(model, lambda batch: shard(batch, dist.get_rank()))
    train(alone, lambda batch: batch)
    mine = model.gather_full_params() if name == "FSDP" else dict(model.module.named_parameters())
    for key, parameter in alone.named_parameters():
        torch.testing.assert_close(mine[key].detach(), parameter.detach(), rtol=0, atol=1e-12, msg=key)


@each_wrapper
def test_equals_one_process(name):
    run_ranks(2, compare_with_one_process, name)


def failing(name: str) -> tuple[str, str]:
    """A backward that fails on rank 1, which goes on to the next batch; then a step of both."""
    model = WRAPPERS[name](same_mlp(), sync="backward")
    part = functools.partial(shard, rank=dist.get_rank())
    batch, said = batches(1, 2)[0], []

    def fail(_: torch.Tensor) -> None:
        raise RuntimeError("planted")

    if dist.get_rank() == 1:  # after the gradients of the last layer
        handle = model.module[1].register_forward_hook(lambda *args: args[-1].register_hook(fail) and None)
    output = model(part(batch[0]))
    if dist.get_rank() == 1:
        handle.remove()
    for go_on in (output.sum().backward, lambda: model(part(batch[0]))):
        try:
            go_on()
        except (ValueError, RuntimeError) as error:
            said.append(str(error))
        if dist.get_rank() == 0:
            break  # its backward has ended in the same error as the other rank's next forward
    model.zero_grad()
    loss(model, batch, part).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    return said[-1], said[0]


@pytest.mark.parametrize("name", HOOKED)
def test_a_backward_that_fails_on_one_rank_is_said_on_the_others(name):
    (last, _), (other, first) = run_ranks(2, failing, name)
    assert first == "planted" and last == other
    assert "backward did not reach its end" in last


def refused(name: str) -> str:
    with pytest.raises(ValueError) as caught:
        WRAPPERS[name](same_mlp(), sync="always" if dist.get_rank() else "call")
    with pytest.raises(ValueError, match="wrap"):
        WRAPPERS[name](same_mlp(), sync="backward" if dist.get_rank() else "call")
    return str(caught.value)


@each_wrapper
def test_other_values_and_ranks_that_differ_are_refused(name):
    assert set(run_ranks(2, refused, name)) == {"rank 1: sync must be 'call' or 'backward', not 'always'"}
