"""Timing in turns, the benchmark of collectives on real ranks, α and β from its times, and ranks for both."""

import os
import signal
import sys
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist

from scratch_ddp.instruments import forked_ranks
from scratch_ddp.instruments.bandwidth import Row, fit, measure
from scratch_ddp.instruments.sizes import format_size, parse_size, three_digits
from scratch_ddp.instruments.timing import Spread, interleaved
from tests.processes import alive, listening_beyond_loopback
from tests.ranks import RankFailed, run_ranks

all_reduce = dist.all_reduce
SIZES = [2**10, 2**14, 2**17, 2**20, 2**24, 2**27]


def row(ranks=2, size=2**20, seconds=1e-3):
    return Row("gloo", ranks, size, Spread(seconds, seconds, seconds), samples=3, calls=1)


def test_every_size_and_number_of_ranks_as_the_slowest_has_them(monkeypatch):
    """Larger messages begin 10 ms late on rank 1, and 20 ms on rank 2."""

    def late(x, *args, **how):
        if x.dtype == torch.float32 and x.nbytes > 1024:
            time.sleep(0.01 * dist.get_rank())
        return all_reduce(x, *args, **how)

    monkeypatch.setattr(dist, "all_reduce", late)
    found, *others = run_ranks(3, lambda: measure(["1KiB", 10_001], ranks=[2, 3], seconds=0.1))
    assert all(other == found for other in others)
    assert [(each.ranks, each.size) for each in found] == [(n, size) for n in (2, 3) for size in (1024, 10_000)]
    for each in found:
        least = 0.01 * (each.ranks - 1) if each.size > 1024 else 0
        assert least < each.seconds.low <= each.seconds.median <= each.seconds.high < 1
        assert each.samples >= 3 and each.calls >= 1 and each.backend == "gloo"
        assert not least or (each.calls == 1 and each.samples <= 0.2 / least)  # a row takes about 0.1 s


def test_bandwidths():
    """nccl-tests' definitions; and the write-up's 1.0172 ms for 1 MiB, which it calls 1.92 GB/s."""
    published = row(seconds=1.0172e-3)
    assert round(published.published / 2**30, 2) == 1.92 and round(published.published / 1e9, 2) == 2.06
    assert published.algbw == published.busbw == published.published / 2
    assert row(ranks=4).busbw == 1.5 * row(ranks=4).algbw == 1.5 * 2**20 / 1e-3


def test_a_line_from_times():
    seconds = [70e-6 + 0.4e-9 * size for size in SIZES]
    found = fit(SIZES, seconds)
    assert found.alpha == pytest.approx(70e-6, rel=1e-9) and found.beta == pytest.approx(0.4e-9, rel=1e-9)
    assert found.worst < 1e-9
    # 20 % more at the largest size is 10 ms, 140 times all of the smallest message's 70 µs: still, it counts as much.
    found = fit(SIZES, [*seconds[:-1], 1.2 * seconds[-1]])
    assert found.alpha == pytest.approx(70e-6, rel=0.05)
    assert found.beta == pytest.approx(0.4e-9, rel=0.2) and 0.05 < found.worst < 0.2
    for times, says in (([3.0, 2.0, 1.0], "measure larger sizes"), ([1.0, 3.0, 5.0], "measure smaller sizes")):
        with pytest.raises(ValueError, match=says):
            fit([10, 20, 30], times)


def test_sizes_as_text():
    sizes = [parse_size(text) for text in ("1KiB", "1 kb", "1.5MiB", "77", 12)]
    assert sizes == [1024, 1000, 1572864, 77, 12]
    assert [format_size(size) for size in (1024, 1000, 2**30, 1500, 5)] == ["1 KiB", "1 KB", "1 GiB", "1,500 B", "5 B"]
    assert [three_digits(value) for value in (0.003236, 12.44, 999.7, 2093.0)] == ["0.00324", "12.4", "1,000", "2,090"]


def test_variants_in_turns_on_ranks_that_listen_on_loopback_only_and_end():
    """Each variant once a round, in another order each time, the same one on every rank."""

    def order_and_samples():
        order = []
        samples = interleaved({name: partial(order.append, name) for name in "abc"}, rounds=30, warm_up=1)
        listening = listening_beyond_loopback([os.getpid()]) if sys.platform == "linux" else []
        return os.getpid(), listening, "".join(order), {name: len(taken) for name, taken in samples.items()}

    pids, listening, (order, other), samples = zip(*run_ranks(2, order_and_samples), strict=True)
    rounds = [order[i : i + 3] for i in range(0, len(order), 3)]
    assert len(rounds) == 31 and {"".join(sorted(each)) for each in rounds} == {"abc"}
    assert len(set(rounds)) == 6 and other == order  # all orders turn up
    assert samples == 2 * (dict.fromkeys("abc", 30),)
    assert listening == ([], []) and not any(map(alive, pids))


def test_a_rank_that_fails_is_named_and_nobody_stays(monkeypatch):
    def fail():
        rank = dist.get_rank()
        if rank == 1:
            raise ZeroDivisionError("rank 1 divides")
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(30)

    monkeypatch.setattr(forked_ranks, "_PATIENCE", 0.5)
    began = time.monotonic()
    with pytest.raises(RankFailed) as failed:
        run_ranks(3, fail)
    assert time.monotonic() - began < 20
    assert failed.value.failures[0] == "did not answer in time"
    assert "rank 1 divides" in failed.value.failures[1] and "exit code -9" in failed.value.failures[2]
