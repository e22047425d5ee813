"""The benchmark of the link: what it prints, on steps twenty times as quick, and what it says by its exit status."""

import re
import sys
from functools import partial

import pytest
import torch.distributed as dist

from scratch_ddp.benchmark import link
from scratch_ddp.benchmark.__main__ import main
from scratch_ddp.benchmark.link import TimedTransfer, exactness, judge_split
from scratch_ddp.course.pages import published_step, split_model
from scratch_ddp.instruments.network import PRESETS

STRATEGIES = ["OverlappedDDP", "BucketedDDP", "torch DDP"]


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(published_step, "PUBLISHED", {name: ms / 20 for name, ms in published_step.PUBLISHED.items()})
    for name in ("COMPUTE", "_FORWARD"):
        monkeypatch.setattr(published_step, name, getattr(published_step, name) / 20)
    monkeypatch.setattr(link, "hidden", partial(link.hidden, backward=0.03))
    monkeypatch.setattr(link, "two_gpus", partial(link.two_gpus, seconds=0.02))


def test_what_it_prints(quick, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmark", "link", "--rounds", "1", "--transfers", "3"])
    status = main()
    printed = capsys.readouterr().out
    assert status == ("| ✗ |" in printed) and not dist.is_initialized()
    lengths = re.findall(
        r"^\| a transfer / \(α \+ bytes·β\), (\d+ ms), (.*?) \| (?:1 ± 0.03|reported)", printed, re.MULTILINE
    )
    modes = ["two ranks over gloo", "one process"]
    assert lengths == [(length, mode) for mode in modes for length in ("1 ms", "5 ms", "20 ms", "50 ms")]
    assert printed.count("| share of a core while waiting, ") == 8
    fitted = re.findall(r"^\| (.*?) \(fitted\) \| \d+ \| \d+ \| \d+ \[", printed, re.MULTILINE)
    assert fitted == ["naive", "flat", "per parameter", "1000 MB"]
    assert re.findall(r"^\| (torch DDP, .*?) \|  \| \d+ \|", printed, re.MULTILINE) == [
        f"torch DDP, {size} MB" for size in (1, 10, 100, 1000)
    ]
    rows = re.findall(r"^\| step / \(compute \+ last transfer\), (.*?) \| (.*?) \|", printed, re.MULTILINE)
    assert rows == list(zip(STRATEGIES, ["≤ 1.03", "≤ 1.03", "reported"], strict=True))
    for name in split_model.LINKS:
        assert re.search(rf"^\| {name} (\| [\d.]+ \([\d.]+\) ){{4}}\|$", printed, re.MULTILINE)
    assert re.findall(r"^\| a split model's step / forecast, (.*?) \| ≤ 1.08 \|", printed, re.MULTILINE) == [
        *("DP", "TP", "PP", "PP, 2 more")
    ]
    assert "(fitted): the link and the timeline were made" in printed


def waits(*seconds, cpu=0.0):
    """Of transfers that were called a second apart, and took so long on this rank."""
    return [TimedTransfer(at, at, at + each, cpu) for at, each in enumerate(seconds)]


@pytest.mark.parametrize(("took", "holds"), [(0.00102, True), (0.00104, False), (0.00096, False)])
def test_each_length_is_judged_by_itself(took, holds):
    row, _ = exactness(0.001, [waits(took, took, 0.002)], waits(0)).rows("1 ms, one process")
    assert row.what == "a transfer / (α + bytes·β), 1 ms, one process" and row.holds == holds
    assert row.measured == f"{1000 * took:.4f} [{1000 * took:.4f}–{500 * took + 1:.4f}]"


def test_a_transfer_begins_with_its_last_rank():
    late = [each._replace(began=each.began + 0.5) for each in waits(0.001)]
    assert exactness(0.001, [waits(0.501), late], waits(0)).ratios.median == pytest.approx(1)


def test_moving_the_data_is_not_waiting():
    mine, without = waits(0.01, 0.01, cpu=0.0035), waits(0.001, cpu=0.003)
    measured = exactness(0.01, [mine], without)
    assert measured.share == pytest.approx(0.05) and measured.rows("")[1].holds
    assert not exactness(0.01, [mine], waits(0.001, cpu=0.0)).rows("")[1].holds


def test_a_link_is_not_judged_by_messages_that_take_longer_without_it():
    slow = [waits(0.003, 0.003, 0.003, 0.003)]
    row, _ = exactness(0.001, slow, waits(0.0002, 0.0003, 0.003, 0.004)).rows("")
    assert row.holds and row.must.startswith("reported")
    row, _ = exactness(0.001, slow, waits(0.0002, 0.0003, 0.0004, 0.0004, 0.003)).rows("")
    assert not row.holds and row.must == "1 ± 0.03"


def test_the_worst_link_decides_for_each_way():
    forecast = {name: split_model.forecasts(PRESETS[name]) for name in ("NVLink 4", "Ethernet 10 Gb")}
    taken = {name: {way: [each] * 3 for way, each in ways.items()} for name, ways in forecast.items()}
    taken["Ethernet 10 Gb"]["TP"] = [1.1 * forecast["Ethernet 10 Gb"]["TP"]] * 3
    table, rows = judge_split(taken)
    assert "| NVLink 4 | 10.0 (10.0) | 11.0 (11.0) |" in table and "on one: 19.8." in table
    assert [row.holds for row in rows] == [True, False, True, True]
    assert rows[1].measured == "1.100 at worst (Ethernet 10 Gb)"
