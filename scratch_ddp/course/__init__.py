"""Exercises in a notebook's cells: commit to a guess, write a function, have it checked on all ranks."""

from scratch_ddp.exercises.checking import check, examine, solution
from scratch_ddp.exercises.guess import reveal
from scratch_ddp.exercises.verdict import Verdict

__all__ = ["Verdict", "check", "examine", "reveal", "solution"]
