"""Exercises in a notebook's cells: commit to a guess, write a function, have it checked on all ranks.

reveal         shows a guess beside what was measured
check          what learners call: an answer passes through the files below
worlds         all ranks first, then fewer: which ranks an answer is tried on
trial          calls the answer and states the criteria: value, agreement, cost, memory …
guard          what a call may not change: arguments, the notebook's names, settings of the process
message_sizes  a message that does not fit is an error, before gloo ends the process
attempt        one call of the answer: bounded in time, its output and messages noted
meeting        what goes on working when an answer breaks the process group
verdict        what all ranks found, as lines
exercise       a reference, and the stub and the answer that are made from it
lessons/       the exercises, one file per lesson: reference, and the function that examines an answer
plots/         the lessons' figures
"""

from scratch_ddp.course.check import check, examine, solution
from scratch_ddp.course.reveal import reveal
from scratch_ddp.course.verdict import Verdict

__all__ = ["Verdict", "check", "examine", "reveal", "solution"]
