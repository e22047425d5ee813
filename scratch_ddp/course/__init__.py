"""Exercises in a notebook's cells: commit to a guess, write a function, have it checked on all ranks.

reveal     shows a guess beside what was measured
check      what learners call: runs the answer beside the reference, and says which criteria hold
run        one call: bounded in time, what it did observed and counted
arena      the process group in which answers are tried, and how ranks tell each other what they found
exercise   a reference, and the stub and the answer that are made from it
compare    how two values differ, in words
lessons/   the exercises, one file per lesson: reference, inputs, and how an answer is used
plots/     the lessons' figures
"""

from scratch_ddp.course.check import check, solution
from scratch_ddp.course.reveal import reveal

__all__ = ["check", "reveal", "solution"]
