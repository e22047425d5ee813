"""Exercises in a notebook's cells: commit to a guess, write a function, have it checked on all ranks."""

from scratch_ddp.course.check import check, examine, solution
from scratch_ddp.course.reveal import reveal
from scratch_ddp.course.verdict import Verdict

__all__ = ["Verdict", "check", "examine", "reveal", "solution"]
