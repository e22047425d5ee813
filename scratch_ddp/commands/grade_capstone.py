"""`grade` for the capstone's files: each is judged in a process of its own, criterion by criterion."""

import json
import subprocess
import sys
from pathlib import Path

KINDS = ("my_ddp", "misbehaving")  # what the files' names begin with


def is_capstone(path: Path) -> bool:
    return path.suffix == ".py" and path.stem.startswith(KINDS)


def judged(path: Path) -> tuple[list[tuple[str, str, str]], str | None]:
    """Return (name, what should hold, complaint) of all criteria, and what went wrong with the judging, if anything.

    A complaint is "" where the criterion holds. Runs the file: trusted code only. Every part of it has a time limit.
    """
    command = [sys.executable, "-m", "scratch_ddp.course.capstone", str(path)]
    process = subprocess.run(command, capture_output=True, text=True)
    try:
        return [tuple(row) for row in json.loads(process.stdout.splitlines()[-1])], None
    except (IndexError, ValueError):
        return [], f"{path} could not be judged: {(process.stderr.strip() or 'it said nothing').splitlines()[-1]}"
