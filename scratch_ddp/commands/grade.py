"""`grade`: run learners' notebooks and say which of their exercises hold.

An exercise is a cell with a line `check(NAME)`. Its verdict is what that cell prints: a line for each group of
criteria, beginning with ✓ or ✗, or `not written yet`. Files of the capstone are judged in a process of their own; their
criteria stand for exercises.
"""

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import nbformat
from nbclient.exceptions import DeadKernelError
from nbformat import NotebookNode

from scratch_ddp.commands.notebooks import run
from scratch_ddp.commands.outputs import clean_outputs, clear_outputs

CAPSTONE = ("my_ddp", "misbehaving")  # what the names of its files begin with
ANSI_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
SAID_BY = re.compile(r"\s+← ranks? [\d–, ]+$")  # the rank cells' label at the end of a line
CHECK = re.compile(r"^check\(\s*([A-Za-z_]\w*)", re.MULTILINE)
HOLDS, FAILS, NOT_WRITTEN, NOT_REACHED = "✓", "✗", "not written", "not reached"


class Graded(NamedTuple):
    """What became of one exercise: its name, one of the words above, and the lines of its criteria."""

    name: str
    status: str
    lines: list[str]


def grade(path: Path, cell_timeout: float) -> list[Graded]:
    """Run a notebook to its end, whatever fails, without changing the file; its exercises in their order."""
    notebook = nbformat.read(path, as_version=4)
    clear_outputs(notebook)
    try:
        run(notebook, path.absolute().parent, keep_going=True, cell_timeout=cell_timeout)
    except DeadKernelError:
        print(f"{path}: the kernel died, so the rest was not reached.")
    return exercises_of(notebook)


def grade_capstone(path: Path) -> list[Graded]:
    """Judge a file of the capstone, every part of it within a time limit."""
    command = [sys.executable, "-m", "scratch_ddp.course.capstone", str(path)]
    ended = subprocess.run(command, capture_output=True, text=True)
    if ended.returncode:
        raise RuntimeError(ended.stderr)
    criteria = json.loads(ended.stdout.splitlines()[-1])
    return [Graded(name, FAILS if wrong else HOLDS, [wrong or promise]) for name, promise, wrong in criteria]


def exercises_of(notebook: NotebookNode) -> list[Graded]:
    """The exercises of a notebook that was run, with the verdict of each."""
    cells = [(CHECK.findall(cell.source), cell) for cell in notebook.cells if cell.cell_type == "code"]
    return [Graded(", ".join(names), *verdict(cell)) for names, cell in cells if names]


def verdict(cell: NotebookNode) -> tuple[str, list[str]]:
    """The status of the exercise that a cell checks, and the lines that say why."""
    if cell.execution_count is None:
        return NOT_REACHED, []
    outputs = clean_outputs(cell.outputs)
    errors = [f"{output.ename}: {output.evalue}" for output in outputs if output.output_type == "error"]
    texts = [output.get("text") or output.get("data", {}).get("text/plain", "") for output in outputs]
    said = [line for text in texts for line in ANSI_COLOUR.sub("", text).splitlines()]
    lines = [SAID_BY.sub("", line).strip() for line in said if line.startswith((HOLDS, FAILS))]
    if errors or any(FAILS in line for line in lines):
        return FAILS, lines + errors
    if lines:
        return HOLDS, lines
    if any("not written yet" in line for line in said):
        return NOT_WRITTEN, []
    return FAILS, ["the check said nothing"]


def as_text(path: Path, exercises: Sequence[Graded]) -> str:
    """Each exercise with its criteria below it, and how many hold."""
    lines = []
    for each in exercises:
        lines += [f"{each.status:12}{each.name}", *(f"{'':14}{line}" for line in each.lines)]
    held = sum(each.status == HOLDS for each in exercises)
    counted = "criteria" if path.suffix == ".py" else "exercises"
    return "\n".join([*lines, f"{path}: {held} of {len(exercises)} {counted} hold.\n"])


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python3 -m scratch_ddp grade",
        description="Run notebooks, and the capstone's my_ddp.py and misbehaving.py, and say which of their exercises "
        "and criteria hold. What is graded runs with all your rights: trusted code only.",
    )
    parser.add_argument("notebooks", nargs="+", type=Path, metavar="FILE", help="it stays as it is")
    parser.add_argument("--cell-timeout", type=float, default=300.0, metavar="SECONDS", help="interrupt longer cells")
    options = parser.parse_args(arguments)
    all_hold = True
    for path in options.notebooks:
        is_capstone = path.suffix == ".py" and path.stem.startswith(CAPSTONE)
        try:
            exercises = grade_capstone(path) if is_capstone else grade(path, options.cell_timeout)
        except Exception as error:  # nbformat raises whatever its parser does
            print(f"{path} can't be graded: {error}\n", flush=True)
            all_hold = False
            continue
        print(as_text(path, exercises), flush=True)
        all_hold = all_hold and all(each.status == HOLDS for each in exercises)
    return 0 if all_hold else 1
