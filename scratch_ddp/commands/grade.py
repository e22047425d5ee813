"""`grade`: run learners' notebooks and say which of their exercises hold.

An exercise is a cell with a line `check(NAME)`. Its verdict is what that cell prints: a line for each group of
criteria, beginning with ✓ or ✗, or `not written yet`. Files of the capstone are judged in a process of their own; their
criteria stand for exercises.
"""

import argparse
import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from scratch_ddp.commands.notebooks import ANSI_COLOUR, CellFailed, run
from scratch_ddp.commands.outputs import clean_outputs, clear_outputs

CAPSTONE = ("my_ddp", "misbehaving")  # what the names of its files begin with
SAID_BY = re.compile(r"\s+← ranks? [\d–, ]+$")  # the rank cells' label at the end of a line
CHECK = re.compile(r"^check\(\s*([A-Za-z_]\w*)", re.MULTILINE)
HOLDS, FAILS = "holds", "fails"
NOT_WRITTEN, NOT_REACHED = "not written", "not reached"
MARKS = {HOLDS: "✓", FAILS: "✗"}


@dataclasses.dataclass
class Exercise:
    """What became of one exercise: its name, one of the words above, and the lines of its criteria."""

    name: str
    status: str
    lines: list[str]


@dataclasses.dataclass
class Report:
    """A notebook's exercises in order and, if it was not run to its end, why."""

    notebook: str
    exercises: list[Exercise]
    stopped: str | None = None

    @property
    def held(self) -> int:
        return sum(exercise.status == HOLDS for exercise in self.exercises)


def grade(path: Path, cell_timeout: float) -> Report:
    """Run a notebook to its end, whatever fails, without changing the file."""
    try:
        notebook, report = nbformat.read(path, as_version=4), Report(str(path), [])
    except Exception as error:  # nbformat raises whatever its parser does
        return Report(str(path), [], f"{path} can't be read as a notebook: {error}")
    clear_outputs(notebook)
    try:
        run(notebook, path.absolute().parent, keep_going=True, cell_timeout=cell_timeout)
    except CellFailed as failure:
        report.stopped = str(failure)
    report.exercises += exercises_of(notebook)
    return report


def grade_capstone(path: Path) -> Report:
    """Judge a file of the capstone, every part of it within a time limit."""
    command = [sys.executable, "-m", "scratch_ddp.course.capstone", str(path)]
    ended = subprocess.run(command, capture_output=True, text=True)
    try:
        criteria = json.loads(ended.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        why = (ended.stderr.strip() or "it said nothing").splitlines()[-1]
        return Report(str(path), [], f"{path} could not be judged: {why}")
    rows = [Exercise(name, FAILS if wrong else HOLDS, [wrong or promise]) for name, promise, wrong in criteria]
    return Report(str(path), rows)


def exercises_of(notebook: NotebookNode) -> Iterator[Exercise]:
    """The exercises of a notebook that was run, with the verdict of each."""
    for cell in notebook.cells:
        names = CHECK.findall(cell.source) if cell.cell_type == "code" else []
        if names:
            yield Exercise(", ".join(names), *verdict(cell))


def verdict(cell: NotebookNode) -> tuple[str, list[str]]:
    """The status of the exercise that a cell checks, and the lines that say why."""
    if cell.execution_count is None:
        return NOT_REACHED, []
    outputs = clean_outputs(cell.outputs)
    errors = [f"{output.ename}: {output.evalue}" for output in outputs if output.output_type == "error"]
    texts = [output.get("text") or output.get("data", {}).get("text/plain", "") for output in outputs]
    said = [line for text in texts for line in ANSI_COLOUR.sub("", text).splitlines()]
    lines = [SAID_BY.sub("", line).strip() for line in said if line.startswith(("✓", "✗"))]
    if errors or any("✗" in line for line in lines):
        return FAILS, lines + errors
    if lines:
        return HOLDS, lines
    if any("not written yet" in line for line in said):
        return NOT_WRITTEN, []
    return FAILS, ["the check said nothing"]


def as_text(report: Report) -> str:
    """A row for each exercise with its criteria below one another, and how many hold."""
    lines, width = [], max((len(each.name) for each in report.exercises), default=0)
    for exercise in report.exercises:
        first, *others = exercise.lines or [""]
        lines.append(f"{exercise.name:{width}}  {MARKS.get(exercise.status, exercise.status):11}  {first}".rstrip())
        lines += [f"{'':{width}}  {'':11}  {line}" for line in others]
    lines += [report.stopped] if report.stopped else []
    counted = "criteria" if report.notebook.endswith(".py") else "exercises"
    return "\n".join([*lines, f"{report.notebook}: {report.held} of {len(report.exercises)} {counted} hold.\n"])


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python3 -m scratch_ddp grade",
        description="Run notebooks, and the capstone's my_ddp.py and misbehaving.py, and say which of their exercises "
        "and criteria hold. What is graded runs with all your rights: trusted code only.",
    )
    parser.add_argument("notebooks", nargs="+", type=Path, metavar="FILE", help="it stays as it is")
    parser.add_argument("--cell-timeout", type=float, default=300.0, metavar="SECONDS", help="interrupt longer cells")
    options = parser.parse_args(arguments)
    reports = []
    for path in options.notebooks:
        is_capstone = path.suffix == ".py" and path.stem.startswith(CAPSTONE)
        reports.append(grade_capstone(path) if is_capstone else grade(path, options.cell_timeout))
        print(as_text(reports[-1]), flush=True)
    return 0 if all(report.held == len(report.exercises) and not report.stopped for report in reports) else 1
