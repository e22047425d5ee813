"""The ranks that benchmarks run on, for tests (`from tests.ranks import run_ranks`)."""

import contextlib
import io
from collections.abc import Callable
from typing import Any

from scratch_ddp.instruments.forked_ranks import RankFailed, run_ranks

__all__ = ["RankFailed", "captured", "run_ranks"]


def captured(function: Callable[[], Any]) -> tuple[Any, str]:
    """What the function returns, and what it prints."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        return function(), printed.getvalue()
