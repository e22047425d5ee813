"""The record of a loop: when the ranks' gradients were apart and by how much, what it sent, what it trained."""

import contextlib

import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.course.pages.loop_probe import Tried, apart, try_out
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
        tried = try_out(loop, model(), batches(), 2, lr=1.0)
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


def test_the_report_compares_ranks_with_each_other_and_with_one_process():
    def ranks():
        alone = model()
        with torch.no_grad():
            alone.weight -= (11 + 22) / 2 + (33 + 44) / 2 + 0.25
        recorded(loop)[0].report(alone)
        recorded(never_syncs)[0].report(alone)

    first = "micro-batches in each step: [2, 2], left over: 1\nall-reduces: {}\n"
    right = first.format(2) + "parameters: ranks apart by 0.000, off from alone by 0.250\n"
    # rank 0 has stepped by 1 + 2 + 3 + 4, rank 1 by ten times as much; alone by 55.25
    parted = first.format(0) + "parameters: ranks apart by 90.000, off from alone by 45.250\n"
    assert [text for _, text in run_ranks(2, ranks, capture=True)] == [right + parted] * 2


def test_apart_is_the_same_on_every_rank_of_a_group():
    def ranks():
        rank = dist.get_rank()
        group = dist.new_group([1, 2])
        mine = [torch.full((2,), float(rank)), torch.tensor(7.0)]
        return apart(mine), apart(mine, [torch.tensor([0.0, 4.0]), mine[1]]), apart(mine, group=group) if rank else None

    assert run_ranks(3, ranks) == [(2.0, 4.0, None), (2.0, 4.0, 1.0), (2.0, 4.0, 1.0)]
