"""Our collectives beside gloo's own: the table, and what it refuses."""

import sys

import pytest

from scratch_ddp.benchmark import rings
from scratch_ddp.benchmark.__main__ import main
from scratch_ddp.benchmark.rings import PAIRS, rows
from scratch_ddp.instruments.timing import Sample


def samples(factor):
    """Ours takes `factor` times the CPU time of gloo's, and twice its wall time."""
    taken = {}
    for pair in PAIRS:
        taken[pair.theirs] = [Sample(1.0, 1.0 + turn) for turn in range(5)]
        taken[pair.ours] = [Sample(2.0, factor * each.cpu) for each in taken[pair.theirs]]
    return taken


def test_cpu_time_is_judged_from_a_size_on():
    large = rows(64 * 10**6, samples(0.45))
    assert [row.holds for row in large] == [True, True, True, False]
    assert [row.must for row in large] == ["≤ 1.20", "≤ 1.20", "≤ 0.50", "≤ 0.40"]
    assert "0.45 [0.45–0.45] of the CPU time, 2 [2–2] of the time" in large[0].measured
    small = rows(8 * 10**6, samples(1.3))
    assert [(row.must, row.holds) for row in small] == [("≤ 1.20", False)] * 2 + [("reported", True)] * 2


@pytest.mark.parametrize("slow", [False, True])
def test_measures_and_says_by_its_exit_status_whether_all_holds(monkeypatch, capsys, slow):
    pairs = [rings.Pair(pair.ours, pair.theirs, 1e-9 if slow else 1e9, 1) for pair in PAIRS]
    monkeypatch.setattr(rings, "PAIRS", tuple(pairs))
    monkeypatch.setattr(sys, "argv", ["benchmark", "rings", "--sizes", "64KiB", "--seconds", "0.1"])
    assert main() == slow
    printed = capsys.readouterr().out
    assert printed.count("| ✗ |" if slow else "| ✓ |") == len(PAIRS)
    assert "our ring_all_reduce / gloo's all_reduce, 64 KiB" in printed


def test_refused_before_it_starts(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmark", "rings", "--sizes", "900XB"])
    assert main() == 2
    assert "'900XB' is no size" in capsys.readouterr().err
