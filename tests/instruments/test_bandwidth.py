"""The benchmark of collectives on real ranks: what it times, what it computes from it, what it refuses."""

import json
import time

import pytest
import torch.distributed as dist

from scratch_ddp.instruments.bandwidth import free_memory as memory_module
from scratch_ddp.instruments.bandwidth import measure, measurement
from scratch_ddp.instruments.bandwidth.operations import OPERATIONS, Operation
from scratch_ddp.instruments.bandwidth.results import Results, Row
from scratch_ddp.instruments.timing import Spread
from scratch_ddp.instruments.traffic import traffic
from tests.ranks import run_ranks


def row(operation="all_reduce", ranks=2, size=2**20, seconds=1e-3, backend="gloo"):
    return Row(operation, backend, "cpu", ranks, size, size, Spread(seconds, seconds, seconds), samples=3, calls=1)


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
        assert each.samples >= 3 and each.calls >= 1 and (each.backend, each.device) == ("gloo", "cpu")
        parts = OPERATIONS[each.operation].in_parts
        assert each.nbytes == (each.size // (4 * each.ranks) * 4 * each.ranks if parts else each.size // 4 * 4)


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_does_what_its_name_says(name):
    """On 3 ranks with numbers that tell ranks and parts apart, against torch.distributed's list forms."""

    def ranks():
        rank, n = dist.get_rank(), 3
        space = measurement.Workspace(4 * 9, dist.group.WORLD, "cpu", second=True)
        whole = space.whole.copy_(10.0 * rank + space.whole.new_tensor(range(9))).clone()
        part = space.part.copy_(whole[:3] + 0.5).clone()
        everyone = [whole - 10 * rank + 10 * other for other in range(n)]
        OPERATIONS[name].run(space, 1)
        total, third = sum(everyone), slice(3 * rank, 3 * rank + 3)
        gathered = [each[:3] + 0.5 for each in everyone]
        expected = {
            "all_reduce": (space.whole, total),
            "ring_all_reduce": (space.whole, total),
            "unchecked_ring_all_reduce": (space.whole, total),
            "broadcast": (space.whole, everyone[1]),
            "tree_broadcast": (space.whole, everyone[1]),
            "reduce": (space.whole, total if rank == 1 else space.whole),
            "all_gather": (space.whole, whole.new_tensor([]).new_tensor([x for each in gathered for x in each])),
            "reduce_scatter": (space.part, total[third]),
            "gather": (space.whole, whole.new_tensor([x for each in gathered for x in each]) if rank == 1 else whole),
            "scatter": (space.part, everyone[1][third]),
            "all_to_all": (space.second, whole.new_tensor([x for each in everyone for x in each[third]])),
        }
        got, wanted = expected[name.removeprefix("direct_")]
        assert got.equal(wanted), (name, rank, got, wanted)
        assert part.numel() == 3

    run_ranks(3, ranks)


def test_the_slowest_rank_counts_and_short_calls_are_timed_several_at_once(monkeypatch):
    def nap(space, root):
        if space.rank == 1:
            time.sleep(0.03)

    monkeypatch.setitem(OPERATIONS, "nap", Operation("nap", nap, lambda n: 1.0, lambda n: 0.0, False, False))
    monkeypatch.setattr(measurement, "SAMPLE", 0.02)  # on a busy machine a call may well take the usual 2 ms

    def ranks():
        return measure([1024], ["nap", "all_reduce"], seconds=0.4)

    slow, fast = run_ranks(2, ranks)[0]
    assert 0.03 <= slow.seconds.median < 0.1 and slow.calls == 1
    assert fast.calls > 1 and fast.samples == slow.samples
    assert slow.samples <= 0.8 / 0.03  # as many as the time given allows


def test_ranks_that_are_not_measured_send_nothing_of_it():
    def ranks():
        with traffic() as counted:
            measure([1024], ["broadcast"], ranks=[2], seconds=0.01)
        return counted.calls["broadcast"], len(dist.distributed_c10d._world.pg_map)

    counts, groups = zip(*run_ranks(3, ranks), strict=True)
    assert counts[0] == counts[1] > counts[2] + 4  # counts[2]: the exchange of the results
    assert groups == (1, 1, 1)  # the group of two is gone


@pytest.mark.parametrize("arguments, says", [
    ({"sizes": ["1 MiB"], "operations": ["all_sum"]}, "no operation is called 'all_sum'; there are all_reduce,"),
    ({"sizes": ["1 MX"]}, "'1 MX' is no size"),
    ({"sizes": [4]}, "4 bytes are too few: 2 ranks need 8"),
    ({"sizes": []}, "nothing to measure: 0 sizes"),
    ({"sizes": ["1KiB"], "ranks": [2, 3]}, "3 ranks asked for, and there are 2"),
    ({"sizes": ["1KiB"], "ranks": [1]}, "ranks must be numbers of ranks, 2 or more"),
    ({"sizes": ["1KiB"], "seconds": float("nan")}, "seconds must be positive and finite"),
    ({"sizes": ["1KiB"], "seconds": 0}, "seconds must be positive and finite"),
    ({"sizes": ["900 GiB"]}, "900 GiB on 2 ranks does not fit"),
    ({"sizes": ["1KiB"], "device": "meta"}, "carries no tensors of meta"),
    ({"sizes": ["1KiB"], "device": "toaster"}, "toaster"),
])  # fmt: skip
def test_refused_on_every_rank_alike(arguments, says):
    def ranks():
        with pytest.raises(ValueError) as refused:
            measure(**arguments)
        measure(["1KiB"], seconds=0.01)  # the group still works
        return str(refused.value)

    first, second = run_ranks(2, ranks)
    assert first == second and says in first


def test_what_one_rank_finds_wrong_all_ranks_raise(monkeypatch):
    def ranks():
        mine = dist.get_rank()
        with pytest.raises(
            ValueError, match="rank 1: entry 0 is measure: sizes .2048., but measure: sizes .1024. on rank 0"
        ):
            measure([1024 * (mine + 1)])
        with pytest.raises(ValueError, match="rank 1: measure: sizes and operations are lists"):
            measure([1024], operations="all_reduce" if mine else ["all_reduce"])
        if mine == 1:
            monkeypatch.setattr(memory_module, "free_memory", lambda: 1000)
        with pytest.raises(ValueError, match="The largest that fits is about"):
            measure([1024])

        def refuse(*_):
            raise RuntimeError("can't allocate memory")

        monkeypatch.setattr(memory_module, "free_memory", lambda: 10**9)
        if mine == 0:
            monkeypatch.setattr(measurement, "Workspace", refuse)
        with pytest.raises(RuntimeError, match="rank 0: 1 KiB could not be allocated"):
            measure([1024], ranks=[2])

    run_ranks(2, ranks)


def test_a_smaller_number_of_ranks_needs_the_default_group():
    def ranks():
        pair = dist.new_group([0, 1, 2])
        if dist.get_rank() < 3:
            with pytest.raises(ValueError, match="leave `group` out"):
                measure([1024], ranks=[2], group=pair)
            assert len(measure([1024], seconds=0.01, group=pair)) == 1

    run_ranks(4, ranks)


def test_bandwidths():
    """nccl-tests' definitions; and the write-up's 1.0172 ms for 1 MiB, which it calls 1.92 GB/s."""
    published = row(seconds=1.0172e-3)
    assert round(published.published / 2**30, 2) == 1.92 and round(published.published / 1e9, 2) == 2.06
    assert published.algbw == published.busbw == published.published / 2
    assert row(ranks=4).busbw == 1.5 * row(ranks=4).algbw == 1.5 * 2**20 / 1e-3
    factors = {name: OPERATIONS[name].bus_factor(4) for name in ("all_gather", "reduce_scatter", "broadcast", "reduce")}
    assert factors == {"all_gather": 0.75, "reduce_scatter": 0.75, "broadcast": 1.0, "reduce": 1.0}
    assert row("broadcast").published is None


def test_series_fits_table_and_json(tmp_path):
    line = [row(ranks=n, size=size, seconds=n * (1e-4 + 1e-9 * size)) for n in (2, 4) for size in (2**10, 2**17, 2**24)]
    found = Results((*line, row("broadcast")))
    assert list(found.series()) == [
        "all_reduce, gloo, 2 ranks",
        "all_reduce, gloo, 4 ranks",
        "broadcast, gloo, 2 ranks",
    ]
    fits, missing = found.fits()
    assert fits["all_reduce, gloo, 4 ranks"].alpha == pytest.approx(4e-4)
    assert list(missing) == ["broadcast, gloo, 2 ranks"] and "1 sizes" in missing["broadcast, gloo, 2 ranks"]
    assert len(found.of("all_reduce", ranks=4)) == 3 and found.of(backend="nccl").rows == ()
    with pytest.raises(ValueError, match="choose one"):
        found.fit()
    above, empty, *lines = str(found).splitlines()
    assert (above, empty) == ("gloo:", "") and len(lines) == 9 and len(set(map(len, lines))) == 1
    assert "2 MB" not in lines[2] and "1 KiB" in lines[2]
    assert str(found.of("all_reduce")).startswith("all_reduce, gloo:\n\n| ranks |")
    several = str(Results((*line, row("broadcast"), row(backend="nccl"))))
    assert several.startswith("| operation  | ranks | backend |") and several.count("| nccl") == 1
    found.save(tmp_path / "found.json", {"cores": 2})
    read = json.loads((tmp_path / "found.json").read_text())
    assert read["cores"] == 2 and len(read["rows"]) == 7 and read["rows"][0]["algbw"] == line[0].algbw
    assert read["fits"]["all_reduce, gloo, 2 ranks"]["beta"] == pytest.approx(2e-9)
