"""Timing in turns, the benchmark of collectives on real ranks, α and β from its times, and ranks for both."""

import os
import signal
import time
from functools import partial

import pytest
import torch.distributed as dist

from scratch_ddp.instruments.bandwidth import AlphaBeta, fit, load_machine, measure, measurement, save_machine
from scratch_ddp.instruments.bandwidth.alpha_beta import key
from scratch_ddp.instruments.bandwidth.operations import OPERATIONS, Operation
from scratch_ddp.instruments.bandwidth.results import Results, Row
from scratch_ddp.instruments.sizes import format_size, parse_size, three_digits
from scratch_ddp.instruments.timing import Spread, interleaved
from tests.processes import alive
from tests.ranks import RankFailed, run_ranks

SIZES = [2**10, 2**14, 2**17, 2**20, 2**24, 2**27]


def row(operation="all_reduce", ranks=2, size=2**20, seconds=1e-3):
    return Row(operation, "gloo", ranks, size, size, Spread(seconds, seconds, seconds), samples=3, calls=1)


def test_every_operation_at_every_size_and_number_of_ranks():
    def ranks():
        return measure(["1KiB", 10_000], list(OPERATIONS), ranks=[2, 3], seconds=0.01)

    found, *others = run_ranks(3, ranks)
    assert all(other == found for other in others)
    assert [(each.ranks, each.size, each.operation) for each in found] == [
        (n, size, name) for n in (2, 3) for size in (1024, 10_000) for name in OPERATIONS
    ]
    for each in found:
        assert 0 < each.seconds.low <= each.seconds.median <= each.seconds.high < 1
        assert each.samples >= 3 and each.calls >= 1 and each.backend == "gloo"
        whole = each.operation.endswith("all_reduce")
        assert each.nbytes == (each.size if whole else each.size // (4 * each.ranks) * 4 * each.ranks)


def test_the_slowest_rank_counts_and_short_calls_are_timed_several_at_once(monkeypatch):
    monkeypatch.setitem(OPERATIONS, "nap", Operation(lambda _: time.sleep(0.03 * dist.get_rank()), 2))
    monkeypatch.setattr(measurement, "SAMPLE", 0.02)  # on a busy machine a call may well take the usual 2 ms
    slow, fast = run_ranks(2, lambda: measure([1024], ["nap", "all_reduce"], seconds=0.4))[0]
    assert 0.03 <= slow.seconds.median < 0.1 and slow.calls == 1
    assert fast.calls > 1 and fast.samples == slow.samples
    assert slow.samples <= 0.8 / 0.03  # as many as the time given allows


def test_bandwidths():
    """nccl-tests' definitions; and the write-up's 1.0172 ms for 1 MiB, which it calls 1.92 GB/s."""
    published = row(seconds=1.0172e-3)
    assert round(published.published / 2**30, 2) == 1.92 and round(published.published / 1e9, 2) == 2.06
    assert published.algbw == published.busbw == published.published / 2
    assert row(ranks=4).busbw == 1.5 * row(ranks=4).algbw == 1.5 * 2**20 / 1e-3
    assert OPERATIONS["all_gather"].bus_factor(4) == 0.75 and row("all_gather").published is None


def test_series_fits_and_table():
    line = [row(ranks=n, size=size, seconds=n * (1e-4 + 1e-9 * size)) for n in (2, 4) for size in SIZES[::2]]
    found = Results((*line, row("all_gather")))
    fits, missing = found.fits()
    assert [fits[f"all_reduce, gloo, {n} ranks"].alpha for n in (2, 4)] == pytest.approx([2e-4, 4e-4])
    assert "1 sizes" in missing["all_gather, gloo, 2 ranks"] and len(missing) == 1
    above, empty, *lines = str(found).splitlines()
    assert (above, empty) == ("gloo:", "") and len(lines) == 9 and len(set(map(len, lines))) == 1
    assert "1 KiB" in lines[2] and str(found.of("all_reduce", ranks=2)).startswith("all_reduce, gloo:\n\n| ranks |")


def test_a_line_from_times():
    seconds = [70e-6 + 0.4e-9 * size for size in SIZES]
    found = fit(SIZES, seconds)
    assert found.alpha == pytest.approx(70e-6, rel=1e-9) and found.beta == pytest.approx(0.4e-9, rel=1e-9)
    assert found.worst < 1e-9 and found.half_way == pytest.approx(70e-6 / 0.4e-9)
    # 20 % more at the largest size is 10 ms, 140 times all of the smallest message's 70 µs: still, it counts as much.
    assert fit(SIZES, [*seconds[:-1], 1.2 * seconds[-1]]).alpha == pytest.approx(70e-6, rel=0.05)
    for sizes, times, says in (
        ([8, 8, 8], [1.0, 1.1, 1.2], "1 sizes"),
        ([10, 20, 30], [3.0, 2.0, 1.0], "measure larger sizes"),
        ([10, 20, 30], [1.0, 3.0, 5.0], "measure smaller sizes"),
    ):
        with pytest.raises(ValueError, match=says):
            fit(sizes, times)


def test_fits_are_kept_beside_what_was_kept_before(tmp_path):
    assert load_machine(folder=tmp_path) is None
    two, four = AlphaBeta(1e-5, 1e-9, 0.1), AlphaBeta(2e-5, 2e-9)
    save_machine({key("all_reduce", "gloo", 2): two}, tmp_path)
    save_machine({key("all_reduce", "nccl", 4): four}, tmp_path)
    assert [load_machine(ranks, tmp_path).alpha for ranks in (2, 4)] == [1e-5, 2e-5]


def test_sizes_as_text():
    assert [parse_size(text) for text in ("1KiB", "1 kb", "1.5MiB", "77", 12)] == [1024, 1000, 1572864, 77, 12]
    with pytest.raises(ValueError, match="'1 MX' is no size"):
        parse_size("1 MX")
    assert [format_size(size) for size in (1024, 1000, 2**30, 1500, 5)] == ["1 KiB", "1 KB", "1 GiB", "1,500 B", "5 B"]
    assert [three_digits(value) for value in (0.003236, 12.44, 999.7, 2093.0)] == ["0.00324", "12.4", "1,000", "2,090"]


def test_every_variant_once_a_round_in_another_order_each_time_and_the_same_one_on_every_rank():
    def order_and_samples():
        order = []
        samples = interleaved({name: partial(order.append, name) for name in "abc"}, rounds=30, warm_up=1)
        return "".join(order), {name: len(taken) for name, taken in samples.items()}

    (order, samples), other = run_ranks(2, order_and_samples)
    rounds = [order[i : i + 3] for i in range(0, len(order), 3)]
    assert len(rounds) == 31 and {"".join(sorted(each)) for each in rounds} == {"abc"}
    assert len(set(rounds)) == 6  # all orders turn up
    assert samples == dict.fromkeys("abc", 30) and other == (order, samples)


def test_a_rank_that_fails_is_named_and_nobody_stays(tmp_path):
    def fail():
        rank = dist.get_rank()
        if rank == 1:
            raise ZeroDivisionError("rank 1 divides")
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        (tmp_path / "pid").write_text(str(os.getpid()))
        time.sleep(30)

    with pytest.raises(RankFailed) as failed:
        run_ranks(3, fail)
    assert not alive(int((tmp_path / "pid").read_text()))
    assert failed.value.failures[0] == "did not answer in time"
    assert "rank 1 divides" in failed.value.failures[1] and "exit code -9" in failed.value.failures[2]
