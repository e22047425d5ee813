"""Runs a learner's file on ranks for a limited time; each rank says where in the file it has failed."""

import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from scratch_ddp.instruments.forked_ranks import RankFailed, run_ranks

LIMIT = 240  # seconds for a run, whatever it does
TIMEOUT = 20.0  # seconds that a rank waits for another, on a busy machine
_LOST = ("Timed out", "timed out", "timeout", "Connection closed", "Connection reset", "Broken pipe")  # what gloo says


def run(world_size: int, function: Callable[..., Any], *args: Any, **options: Any) -> tuple[list[Any], str]:
    """`run_ranks`, but where a rank dies or does not come back: return [] and a sentence about it."""
    try:
        return run_ranks(world_size, function, *args, **{"timeout": LIMIT, "waits": TIMEOUT} | options), ""
    except RankFailed as failed:
        reports = sorted(failed.failures.items())
        return [], "; ".join(f"rank {rank} {report.splitlines()[-1]}" for rank, report in reports)


def end_of(path: Path, function: Callable[[], object]) -> str:
    """Call the function on a rank. Return what it raises, or at which line of the file it waits in vain; or ""."""
    try:
        function()
    except (Exception, SystemExit) as error:
        if isinstance(error, SystemExit):
            if not error.code:
                return ""
            error = error.__context__ or error  # the training command ends with what was raised
        frames = [each for each in traceback.extract_tb(error.__traceback__) if each.filename == str(path)]
        place = f"a place outside of {path.name}"
        if frames:
            place = f"{path.name}, line {frames[-1].lineno}: `{frames[-1].line}`"
        waits = isinstance(error, RuntimeError) and any(words in str(error) for words in _LOST)
        text = f"waits at {place}" if waits else f"raises {type(error).__name__}: {error} ({place})"
        return f"rank {dist.get_rank()} {' '.join(text.split())[:300]}"
    return ""


def causes(ends: Iterable[str]) -> str:
    """How the ranks have ended, in one line; where one has raised, without those that wait because of it."""
    said = [each for each in ends if each]
    return "; ".join([each for each in said if " raises " in each] or said)
