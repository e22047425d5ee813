"""Who sees a progress bar."""

import contextlib
import io

from scratch_ddp.common.progress import shows_progress
from scratch_ddp.instruments.bandwidth import measure
from tests.ranks import run_ranks


def test_by_default_where_a_terminal_is_or_the_environment_says(monkeypatch):
    monkeypatch.delenv("SCRATCH_DDP_PROGRESS", raising=False)
    assert not shows_progress(0)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert shows_progress(0) and not shows_progress(1)
    monkeypatch.setenv("SCRATCH_DDP_PROGRESS", "0")
    assert not shows_progress(0)
    monkeypatch.setenv("SCRATCH_DDP_PROGRESS", "1")
    assert shows_progress(0) and not shows_progress(1)


def test_what_is_wanted_is_done_on_the_first_rank(monkeypatch):
    monkeypatch.setenv("SCRATCH_DDP_PROGRESS", "0")
    assert shows_progress(0, True) and not shows_progress(1, True) and not shows_progress(0, False)


def test_a_measurement_shows_it_on_the_first_rank_only(monkeypatch):
    monkeypatch.setenv("SCRATCH_DDP_PROGRESS", "1")

    def shown():
        with contextlib.redirect_stderr(io.StringIO()) as written:
            measure(["1KiB", "4KiB"], ["all_reduce"], seconds=0.01)
        return written.getvalue()

    first, second = run_ranks(2, shown)
    assert "2 ranks, 4 KiB" in first and second == ""
