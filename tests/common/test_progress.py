from scratch_ddp.common.progress import shows_progress


def test_bars_are_shown_on_the_first_rank_where_a_terminal_is_or_the_environment_says(monkeypatch):
    monkeypatch.delenv("SCRATCH_DDP_PROGRESS", raising=False)
    assert not shows_progress(0)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert shows_progress(0) and not shows_progress(1)
    monkeypatch.setenv("SCRATCH_DDP_PROGRESS", "0")
    assert not shows_progress(0)
