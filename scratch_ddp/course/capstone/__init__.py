"""The capstone: a learner's own data-parallel class, and a script that misbehaves, judged by what they do on ranks.

`python -m scratch_ddp.course.capstone FILE` judges one file and prints JSON; `python3 -m scratch_ddp grade` calls it.
What it judges runs with all your rights, each part for a limited time.
"""
