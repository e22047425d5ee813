"""The references of lessons 13, 15 and 16, which judge the answers, held against simulations and the package's sums."""

import itertools
import random
from dataclasses import replace

import pytest
import torch

from scratch_ddp.course.lessons import lesson_13, lesson_15, lesson_16
from scratch_ddp.instruments.cost import (
    CLUSTERS,
    MODELS,
    Layout,
    Wire,
    rank_memory,
    step_time,
    tokens_to_be_compute_bound,
)
from scratch_ddp.pipeline import simulate

XXL, H100 = MODELS["XXL"], CLUSTERS["H100"]


@pytest.mark.parametrize("forward, backward, hop", [(1, 2, 0), (1, 2, 0.125), (1, 2, 1.5), (1, 2, 1.625), (2, 2, 8)])
def test_so_many_forwards_ahead_and_neither_waits_and_one_fewer_and_one_does(forward, backward, hop):
    def between_two(k):
        rows = lesson_13.with_forwards_ahead(2, 60, k)
        starts = [
            start for action, start, _ in simulate(rows, {"F": forward, "B": backward}, hop)[0] if action[0] == "B"
        ]
        return (starts[40] - starts[20]) / 20

    k = lesson_13.forwards_ahead(forward, backward, hop)
    assert between_two(k) == forward + backward
    assert k == 1 or between_two(k - 1) > forward + backward


@pytest.mark.parametrize("dp, tp, pp, stage", [(4, 1, 1, 0), (8, 8, 1, 1), (2, 8, 6, 1), (1, 4, 63, 0)])
def test_bytes_and_gpus_are_those_of_the_package(dp, tp, pp, stage):
    layout = Layout(dp, tp, pp, 1, pp + 1, ("DDP", "ZeRO-1")[stage])
    ours = lesson_15.bytes_of_rank(lesson_15.XXL, dp, tp, pp, stage, 2048)
    assert ours == pytest.approx(rank_memory(XXL, layout, 2048).total)
    n = lesson_15.devices_needed(XXL.parameters, 80 * 10**9, 3, 10**10)
    held = [lesson_15.bytes_of_rank(lesson_15.XXL, each, 1, 1, 3, 0) + 10**10 for each in (n - 1, n)]
    assert held[1] <= 80 * 10**9 < held[0]


def test_tokens_and_seconds_are_those_of_the_package():
    for n in (2, 8, 100):
        found = lesson_15.smallest_batch(989e12, 50e9, 1e-5, XXL.block, n)
        assert found == tokens_to_be_compute_bound(989e12, Wire(1e-5, 1 / 50e9, n), XXL.block)
    blocks = replace(MODELS["Llama-3-70B"], vocabulary=0, kv_heads=64, norm_vectors=0)  # nothing but matrices
    layouts = Layout(), Layout(1, 8, checkpointing=True), Layout(4, 2, 1, 1, 3, "ZeRO-2"), Layout(1, 1, 4, 1, 8)
    for layout in layouts:
        whole = step_time(blocks, layout, H100, 64).total  # of so few tokens that the scores hardly count
        assert lesson_15.step_seconds(blocks, layout, H100, 64) == pytest.approx(whole, rel=0.02)


def test_a_resumed_run_sees_each_item_of_an_epoch_once_however_often_the_ranks_change():
    saved = {"seed": 5, "items": 50, "ranks": 4, "per_rank": 3, "done": 0}
    seen = []
    for n, steps in itertools.cycle([(4, 2), (3, 1), (1, 4), (6, 3)]):
        seen += [
            sum(parts, []) for parts in zip(*(lesson_16.resume(saved, r, n, steps) for r in range(n)), strict=True)
        ]
        saved["done"] += steps
        if len(seen) >= 10:
            break
    assert [sorted(sum(seen[5 * epoch :][:5], [])) for epoch in (0, 1)] == [list(range(50))] * 2
    assert sum(seen[:5], []) != sum(seen[5:10], [])


def test_the_saving_interval_loses_least_in_a_simulation():
    def lost(interval, save=20, between=7200):
        draw, clock, kept = random.Random(0), 0.0, 0.0
        for _ in range(20_000):
            life = draw.expovariate(1 / between)
            kept, clock = kept + interval * (life // (interval + save)), clock + life
        return 1 - kept / clock

    best = lesson_16.saving_interval(20, 0, 1, 12)
    assert lost(best) < min(lost(0.6 * best), lost(1.6 * best))


def test_a_ring_sends_out_of_hosts_what_its_messages_say():
    torch.manual_seed(0)
    ring, host_of = torch.randperm(6).tolist(), {rank: "abc"[rank % 3] for rank in range(8)}
    sent = dict.fromkeys("abc", 0)
    for _, place in itertools.product(range(2 * 5), range(6)):  # rounds, ranks
        here, there = host_of[ring[place]], host_of[ring[(place + 1) % 6]]
        sent[here] += 10 * (here != there)
    assert lesson_16.bytes_out_of_hosts(ring, host_of, 60) == sent
