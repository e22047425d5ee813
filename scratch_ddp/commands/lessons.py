"""Where the lessons stand, and how a lesson is named on the command line."""

import re
import sys
from pathlib import Path

from scratch_ddp.commands.environment import ROOT

NOTEBOOKS = ROOT / "notebooks"
KERNEL_NAME = "Distributed training"  # as JupyterLab shows it
COPIES = ROOT / "my_lessons"  # beside the originals, so that ../assets/… is the same folder for both


class UsageError(Exception):
    """Something that does not exist was asked for; the message says what does."""


def lesson_paths(folder: Path = NOTEBOOKS) -> list[Path]:
    """The notebooks of a folder, in the order of their numbers: 14_….ipynb, then 14b_….ipynb."""
    return sorted(path for path in folder.glob("*.ipynb") if re.match(r"\d\d[a-z]?_", path.name))


def find_lesson(name: str, folder: Path = NOTEBOOKS) -> Path:
    """The lesson that `2`, `02`, `02_inside_all_reduce`, its file name or its path means; `14b` is not `14`."""
    stem = Path(name).name.removesuffix(".ipynb")
    short = re.fullmatch(r"(\d+)([a-z]?)", stem, re.ASCII)
    number = f"{int(short[1]):02d}{short[2]}_" if short else None
    found = [path for path in lesson_paths(folder) if path.stem == stem or (number and path.stem.startswith(number))]
    if not found:
        there = ", ".join(path.stem for path in lesson_paths(folder)) or "none yet"
        raise UsageError(f"There is no lesson {name!r}. The lessons: {there}.")
    return found[0]


def complain(error: Exception) -> int:
    """Print what was wrong on stderr; returns the exit status of a command that was asked for something wrong."""
    print(error, file=sys.stderr)
    return 2
