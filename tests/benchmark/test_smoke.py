"""Every benchmark measures: one round of tiny sizes, and a figure in each row."""

import contextlib
import sys
from collections.abc import Iterable

import pytest

from scratch_ddp.benchmark import cells, link, pipeline, rings, steps, tensor_parallel, training
from scratch_ddp.benchmark.__main__ import main
from tests.ranks import printed_under_torchrun

TINY = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2}


def holds(rows: Iterable[steps.Row], count: int) -> None:
    rows = list(rows)
    assert len(rows) == count and all(what and any(map(str.isdigit, figure)) for what, figure in rows)


@pytest.fixture(scope="module", autouse=True)
def _prepared():
    steps.prepare()


def test_training_steps():
    sizes = TINY | {"vocab_size": steps.VOCABULARY}
    holds(training.rows(1, sizes, sizes), 4 + 2 + 2 + 2 + 3)


def test_slices_beside_dtensor():
    holds(steps.beside(steps.on_ranks(2, tensor_parallel.measure, 1, TINY), tensor_parallel.PAIRS), 3)


def test_pipelines_beside_torchs():
    sizes = TINY | {"vocab_size": steps.VOCABULARY, "num_hidden_layers": 4}
    holds(steps.beside(steps.on_ranks(2, pipeline.measure, 1, sizes), pipeline.TORCHS.items()), 3)
    schedule, _ = pipeline.SLEEPING["GPipe"]
    assert steps.on_ranks(4, pipeline.sleep_through, 1, schedule, 0.002) > 22 * 0.002


def test_collectives_beside_gloos():
    holds(steps.beside(steps.on_ranks(2, rings.measure, 1, 2**16), rings.PAIRS), 4)


def printed_by(monkeypatch, capsys, *options: str) -> str:
    monkeypatch.setattr(sys, "argv", ["benchmark", *options])
    main()
    return capsys.readouterr().out


def test_commands(monkeypatch, capsys):
    small = ["collectives", "--sizes", "64KiB", "--seconds", "0.1"]
    assert "|     2 | 64 KiB |" in printed_by(monkeypatch, capsys, *small, "--ranks", "2")
    assert "two ranks over gloo |" in printed_by(monkeypatch, capsys, "link", "--rounds", "2")

    def as_torchrun_starts_it():
        sys.argv = ["benchmark", *small]
        main()

    first, *others = printed_under_torchrun(3, as_torchrun_starts_it)
    assert "|     3 | 64 KiB |" in first and others == ["", ""]


def test_a_transfer_begins_with_the_last_call_and_ends_on_the_first_rank():
    first, second = (0.0, 2.0, 0.5), (1.0, 3.0, 0.0)  # called, ended, busy
    table = link.beside_stated("here", [[[first]] * 4, [[second]] * 4])
    assert next(table) == ("a transfer / (α + bytes·β), 1 ms, here", "1000.0000 [1000.0000–1000.0000]; 25.0% of a core")


def test_rank_cells(four_ranks, monkeypatch):
    """On ranks that are there already."""
    monkeypatch.setattr(cells, "Kernel", lambda **_: contextlib.nullcontext(four_ranks))
    holds([cells.stops(1), cells.round_trips(4, 3), *cells.beside_gloo(turns=1)], 5)
