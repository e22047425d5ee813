"""The record of a loop: when the ranks' gradients were apart and by how much, and what it sent."""

import contextlib

import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.course.pages.loop_probe import try_out
from tests.ranks import run_ranks


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


def test_every_moment_is_noted_and_what_the_loop_sends_is_counted():
    """With the loss w·x the gradients of five micro-batches are 1, 2, … 5 on rank 0, and 10 times as much on rank 1."""

    def ranks():
        found = []
        for each in (loop, never_syncs):
            layer = nn.Linear(1, 1, bias=False, dtype=torch.float64)
            nn.init.ones_(layer.weight)
            batches = torch.arange(1.0, 6.0, dtype=torch.float64).view(5, 1, 1) * 10 ** dist.get_rank()
            found.append(try_out(each, layer, list(batches), 2))
        tried, silent = found
        apart = tried.apart_at("step"), tried.apart_at("sync"), silent.apart_at("step")
        return tried.events, tried.steps, tried.left_over, tried.all_reduces, silent.all_reduces, apart

    window_1 = [("backward", 9.0), ("sync", 9.0), ("backward", 27.0), ("sync", 0.0), ("step", 0.0)]
    window_2 = [("backward", 27.0), ("sync", 27.0), ("backward", 63.0), ("sync", 0.0), ("step", 0.0)]
    rest, apart = [("backward", 45.0), ("sync", 45.0)], ([0.0, 0.0], [9.0, 0.0, 27.0, 0.0, 45.0], [27.0, 63.0])
    assert run_ranks(2, ranks) == [(window_1 + window_2 + rest, [2, 2], 1, 2, 0, apart)] * 2
