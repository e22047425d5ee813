"""The record of a loop: when the ranks' gradients were apart and by how much, and what it sent."""

import contextlib

import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.course.pages.loop_probe import Tried, try_out
from scratch_ddp.instruments.traffic import traffic
from tests.ranks import run_ranks


def model() -> nn.Module:
    layer = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    nn.init.ones_(layer.weight)
    return layer


def batches() -> list[torch.Tensor]:
    """Five micro-batches; with the loss w·x their gradients are 1, 2, … 5 on rank 0 and 10 times as much on rank 1."""
    return list(torch.arange(1.0, 6.0, dtype=torch.float64).view(5, 1, 1) * 10 ** dist.get_rank())


def loop(model, optimizer, batches, n):
    for i, x in enumerate(batches):
        last = (i + 1) % n == 0
        with contextlib.nullcontext() if last else model.no_sync():
            model(x).sum().backward()
            model.sync_gradients()
        if last:
            optimizer.step()
            optimizer.zero_grad()


def never_syncs(model, optimizer, batches, n):
    with model.no_sync():
        loop(model, optimizer, batches, n)


def recorded(loop) -> tuple[Tried, list]:
    with traffic() as counted:
        tried = try_out(loop, model(), batches(), 2)
    return tried, counted.calls.get("all_reduce", 0)


def test_every_moment_is_noted_in_its_order():
    def ranks():
        tried, _ = recorded(loop)
        return tried.events, tried.steps, tried.left_over, tried.apart_at("step"), tried.apart_at("sync")

    window_1 = [("backward", 9.0), ("sync", 9.0), ("backward", 27.0), ("sync", 0.0), ("step", 0.0)]
    window_2 = [("backward", 27.0), ("sync", 27.0), ("backward", 63.0), ("sync", 0.0), ("step", 0.0)]
    rest = [("backward", 45.0), ("sync", 45.0)]
    expected = (window_1 + window_2 + rest, [2, 2], 1, [0.0, 0.0], [9.0, 0.0, 27.0, 0.0, 45.0])
    assert run_ranks(2, ranks) == [expected] * 2


def test_only_what_the_loop_sends_is_counted():
    def ranks():
        (tried, calls), (silent, none) = recorded(loop), recorded(never_syncs)
        assert tried.all_reduces == calls == 2
        assert silent.all_reduces == none == 0
        return silent.apart_at("step")

    assert run_ranks(2, ranks) == [[27.0, 63.0]] * 2
