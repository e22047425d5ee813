"""The ranks that benchmarks run on, for tests (`from tests.ranks import run_ranks`)."""

from scratch_ddp.instruments.forked_ranks import RankFailed, run_ranks

__all__ = ["RankFailed", "run_ranks"]
