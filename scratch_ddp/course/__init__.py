"""Exercises in a notebook's cells: commit to a guess, write a function, have it checked on all ranks."""

from scratch_ddp.course.check import check, solution
from scratch_ddp.course.reveal import reveal

__all__ = ["check", "reveal", "solution"]
