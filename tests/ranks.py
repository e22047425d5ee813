"""The ranks that benchmarks run on, for tests (`from ranks import run_ranks`)."""

from scratch_ddp.benchmark.ranks import RankFailed, run_ranks

__all__ = ["RankFailed", "run_ranks"]
