"""`grade`: run learners' notebooks and say which of their exercises hold.

An exercise is a cell with a line `check(NAME)`. Its verdict is what that cell prints: a line for each group of
criteria, beginning with ✓ or ✗, or `not written yet`. Exercises of the lesson whose check was removed count as missing.
The files of the capstone have criteria in the place of exercises (`grade_capstone`).
"""

import argparse
import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from scratch_ddp.commands.execution import ANSI_COLOUR, CellFailed, run
from scratch_ddp.commands.grade_capstone import is_capstone, judged
from scratch_ddp.commands.lessons import NOTEBOOKS, UsageError, complain, lesson_paths
from scratch_ddp.commands.outputs import clean_outputs, clear_outputs

SAID_BY = re.compile(r"\s+← ranks? [\d–, ]+$")  # the rank cells' label at the end of a line
CHECK = re.compile(r"^check\(\s*([A-Za-z_]\w*)", re.MULTILINE)
HOLDS, FAILS = "holds", "fails"
NOT_WRITTEN, NOT_REACHED, MISSING = "not written", "not reached", "missing"
MARKS = {HOLDS: "✓", FAILS: "✗"}


@dataclasses.dataclass
class Exercise:
    """What became of one exercise: its name, one of the words above, and the lines of its criteria."""

    name: str
    status: str
    lines: list[str]


@dataclasses.dataclass
class Report:
    """A notebook's exercises in order and, if the kernel died on the way, where."""

    notebook: str
    exercises: list[Exercise]
    stopped: str | None
    counted = "exercises"

    @property
    def held(self) -> int:
        return sum(exercise.status == HOLDS for exercise in self.exercises)

    @property
    def all_hold(self) -> bool:
        return self.held == len(self.exercises) and not self.stopped


class CapstoneReport(Report):
    """The same of a file of the capstone, whose criteria stand for exercises."""

    counted = "criteria"


def grade_capstone(path: Path) -> CapstoneReport:
    """Judge a file of the capstone."""
    criteria, stopped = judged(path)
    rows = [
        Exercise(name, FAILS if complaint else HOLDS, [complaint or promise]) for name, promise, complaint in criteria
    ]
    return CapstoneReport(str(path), rows, stopped)


def grade(path: Path, cell_timeout: float, lesson: Path | None = None) -> Report:
    """Run a notebook to its end, whatever fails, without changing the file.

    With `lesson`, the original, exercises that only the original has are MISSING.
    """
    notebook = read(path)
    original = read(lesson) if lesson else None
    clear_outputs(notebook)
    stopped = None
    try:
        run(notebook, path.absolute().parent, keep_going=True, cell_timeout=cell_timeout)
    except CellFailed as failure:
        stopped = str(failure)
    exercises = list(exercises_of(notebook))
    there = {exercise.name for exercise in exercises}
    wanted = exercises_of(original) if original else ()
    exercises += [Exercise(exercise.name, MISSING, []) for exercise in wanted if exercise.name not in there]
    return Report(str(path), exercises, stopped)


def read(path: Path) -> NotebookNode:
    """A notebook, or UsageError if the file is none."""
    try:
        return nbformat.read(path, as_version=4)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except Exception as error:  # nbformat raises whatever its parser does
        raise UsageError(f"{path} is not a notebook: {error}") from None


def refuse_others(path: Path) -> None:
    """Raise UsageError unless the file is a notebook or one of the capstone."""
    if not is_capstone(path):
        read(path)
    elif not path.is_file():
        raise UsageError(f"{path}: there is no such file")


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
    said = [line for output in outputs for line in text_of(output).splitlines()]
    lines = [SAID_BY.sub("", line).strip() for line in said if line.startswith(("✓", "✗"))]
    if errors or any("✗" in line for line in lines):
        return FAILS, lines + errors
    if lines:
        return HOLDS, lines
    if any("not written yet" in line for line in said):
        return NOT_WRITTEN, []
    return FAILS, ["the check said nothing"]


def text_of(output: NotebookNode) -> str:
    """What an output says as plain text, without colours."""
    text = output.get("text") or output.get("data", {}).get("text/plain", "")
    return ANSI_COLOUR.sub("", text)


def as_text(report: Report) -> str:
    """The notebook's name, the table of its exercises, and how many hold."""
    lines = [f"── {report.notebook}"]
    lines += [as_table(report.exercises)] if report.exercises else []
    lines += [report.stopped] if report.stopped else []
    return "\n".join([*lines, f"{report.held} of {len(report.exercises)} {report.counted} hold.\n"])


def as_table(exercises: list[Exercise]) -> str:
    """One row an exercise, its criteria below one another."""
    width = max(len(exercise.name) for exercise in exercises)
    rows = []
    for exercise in exercises:
        first, *others = exercise.lines or [""]
        mark = MARKS.get(exercise.status, exercise.status)
        rows.append(f"{exercise.name:{width}}  {mark:11}  {first}".rstrip())
        rows += [f"{'':{width}}  {'':11}  {line}" for line in others]
    return "\n".join(rows)


def as_overview(reports: list[Report]) -> str:
    """One row a notebook: how many of its exercises hold, and what became of the others."""
    width = max(len(report.notebook) for report in reports)
    rows = []
    for report in reports:
        others = [f"{each.name} {each.status}" for each in report.exercises if each.status != HOLDS]
        others += ["the kernel died"] if report.stopped else []
        held = f"{report.held} of {len(report.exercises)}"
        rows.append(f"{report.notebook:{width}}  {held:8}  {', '.join(others)}".rstrip())
    return "\n".join(rows)


def original_of(path: Path, notebooks: Path = NOTEBOOKS) -> Path | None:
    """The lesson that a copy was made from, told by its number: `02_inside_all_reduce-2026-01-31-….ipynb` is of 02."""
    return next((lesson for lesson in lesson_paths(notebooks) if path.name.startswith(lesson.stem[:3])), None)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python3 -m scratch_ddp grade",
        description="Run notebooks, and the capstone's my_ddp.py and misbehaving.py, and say which of their exercises "
        "and criteria hold. What is graded runs with all your rights: trusted code only.",
    )
    parser.add_argument("notebooks", nargs="+", type=Path, metavar="FILE", help="it stays as it is")
    parser.add_argument("--json", action="store_true", help="print JSON, a list of notebooks, instead of tables")
    parser.add_argument("--cell-timeout", type=float, default=300.0, metavar="SECONDS", help="interrupt longer cells")
    options = parser.parse_args(arguments)
    reports = []
    try:
        for path in options.notebooks:
            refuse_others(path)  # before anything runs
        for path in options.notebooks:
            lone = is_capstone(path)
            reports.append(grade_capstone(path) if lone else grade(path, options.cell_timeout, original_of(path)))
            if not options.json:
                print(as_text(reports[-1]), flush=True)
    except UsageError as error:
        return complain(error)
    if options.json:
        rows = [{**dataclasses.asdict(report), "held": report.held} for report in reports]
        print(json.dumps(rows, indent=1, ensure_ascii=False))
    elif len(reports) > 1:
        print(as_overview(reports))
    return 0 if all(report.all_hold for report in reports) else 1
