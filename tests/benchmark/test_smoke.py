"""Every benchmark measures: one round of tiny sizes, and a figure in each row. Bad options are refused in a line."""

import argparse
import subprocess
import sys

import pytest

from scratch_ddp.benchmark import cells, link, pipeline, rings, steps, tensor_parallel, training
from scratch_ddp.benchmark.__main__ import main

TINY = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2}
OPTIONS = argparse.Namespace(rounds=1, ranks=2, backend="gloo")


def holds(rows: list[steps.Row], count: int) -> None:
    assert len(rows) == count and all(what and any(map(str.isdigit, figure)) for what, figure in rows)


@pytest.fixture(scope="module", autouse=True)
def _prepared():
    steps.prepare(OPTIONS, "")


def test_training_steps():
    sizes = TINY | {"vocab_size": steps.VOCABULARY}
    holds(training.rows(OPTIONS, sizes, sizes), 4 + 2 + 2 + 2 + 3)


def test_slices_beside_dtensor():
    holds(steps.beside(steps.on_ranks(2, tensor_parallel.measure, 1, TINY), tensor_parallel.PAIRS), 3)


def test_pipelines_beside_torchs():
    sizes = TINY | {"vocab_size": steps.VOCABULARY, "num_hidden_layers": 4}
    holds(steps.beside(steps.on_ranks(2, pipeline.measure, 1, sizes), pipeline.TORCHS.items()), 3)
    name, (rows, _) = next(iter(pipeline.SLEEPING.items()))
    assert name == "GPipe" and steps.on_ranks(4, pipeline.sleep_through, 1, rows, 0.002) > 22 * 0.002


def test_collectives_beside_gloos():
    holds(steps.beside(steps.on_ranks(2, rings.measure, 1, 2**16), rings.PAIRS), 4)


@pytest.mark.parametrize("options", [["collectives", "--ranks", "2"], ["link", "--transfers", "2"]])
def test_commands(options):
    small = ["--sizes", "64KiB", "--seconds", "0.1"] if options[0] == "collectives" else []
    command = [sys.executable, "-m", "scratch_ddp.benchmark", *options, *small]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert ("64 KiB" if small else "two ranks over gloo |") in ended.stdout


def test_a_transfer_begins_with_the_last_call_and_ends_on_the_first_rank():
    first, second = (0.0, 2.0, 0.5), (1.0, 3.0, 0.0)  # called, ended, busy
    table = link.rows("here", [[[first]] * 4, [[second]] * 4])
    assert table[0] == ("a transfer / (α + bytes·β), 1 ms, here", "1000.0000 [1000.0000–1000.0000]; 25.0% of a core")


def test_rank_cells():
    holds([cells.stops(1), cells.round_trips(2, 3), *cells.beside_gloo()], 5)


@pytest.mark.parametrize(
    "options, said",
    [
        (["training", "--rounds", "0"], "a whole number, 1 or more, is needed, not '0'"),
        (["training", "--backend", "nccl", "--ranks", "99"], "GPUs for 99 ranks"),
        (["rings", "--sizes", "soon"], "'soon' is no size"),
    ],
)
def test_refused(monkeypatch, capsys, options, said):
    monkeypatch.setattr(sys, "argv", ["benchmark", *options])
    try:
        assert main() == 2
    except SystemExit as ended:  # argparse's own
        assert ended.code == 2
    assert said in capsys.readouterr().err
