"""`grade`: run a learner's notebook and say which of its exercises hold.

An exercise is a cell with a line `check(NAME)`. Its verdict is what that cell prints: a line for each group of
criteria, beginning with ✓ or ✗, or `not written yet`. Exercises of the lesson whose check was removed count as missing.
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
from scratch_ddp.commands.lessons import NOTEBOOKS, UsageError, complain, lesson_paths
from scratch_ddp.commands.outputs import clean_outputs, clear_outputs

SAID_BY = re.compile(r"\s+← ranks? [\d–, ]+$")  # the rank cells' label at the end of a line
CHECK = re.compile(r"^check\(\s*([A-Za-z_]\w*)", re.MULTILINE)
HOLDS, FAILS, NOT_WRITTEN, NOT_REACHED, MISSING = "holds", "fails", "not written", "not reached", "missing"
MARKS = {HOLDS: "✓", FAILS: "✗"}


@dataclasses.dataclass
class Exercise:
    """What became of one exercise: its name, one of the words above, and the lines of its criteria."""

    name: str
    status: str
    lines: list[str]


def grade(path: Path, cell_timeout: float, lesson: Path | None = None) -> tuple[list[Exercise], str | None]:
    """Run a notebook to its end, whatever fails, without changing the file.

    Returns its exercises in order and, if the kernel died on the way, where. With `lesson`, the original, exercises
    that only the original has are MISSING.
    """
    notebook = read(path)
    clear_outputs(notebook)
    stopped = None
    try:
        run(notebook, path.absolute().parent, keep_going=True, cell_timeout=cell_timeout)
    except CellFailed as failure:
        stopped = str(failure)
    exercises = list(exercises_of(notebook))
    there = {exercise.name for exercise in exercises}
    wanted = exercises_of(read(lesson)) if lesson else ()
    exercises += [Exercise(exercise.name, MISSING, []) for exercise in wanted if exercise.name not in there]
    return exercises, stopped


def read(path: Path) -> NotebookNode:
    """A notebook, or UsageError if the file is none."""
    try:
        return nbformat.read(path, as_version=4)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except Exception as error:  # nbformat raises whatever its parser does
        raise UsageError(f"{path} is not a notebook: {error}") from None


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


def original_of(path: Path, notebooks: Path = NOTEBOOKS) -> Path | None:
    """The lesson that a copy was made from, told by its number: `02_inside_all_reduce-2026-01-31-….ipynb` is of 02."""
    return next((lesson for lesson in lesson_paths(notebooks) if path.name.startswith(lesson.stem[:3])), None)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python3 -m scratch_ddp grade", description="Which exercises hold?")
    parser.add_argument("notebook", type=Path, metavar="NOTEBOOK", help="the file; it stays as it is")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--cell-timeout", type=float, default=300.0, metavar="SECONDS", help="interrupt longer cells")
    options = parser.parse_args(arguments)
    try:
        exercises, stopped = grade(options.notebook, options.cell_timeout, original_of(options.notebook))
    except UsageError as error:
        return complain(error)
    held = sum(exercise.status == HOLDS for exercise in exercises)
    if options.json:
        rows = [dataclasses.asdict(exercise) for exercise in exercises]
        report = {"notebook": options.notebook.name, "held": held, "exercises": rows, "stopped": stopped}
        print(json.dumps(report, indent=1, ensure_ascii=False))
    else:
        if exercises:
            print(as_table(exercises))
        if stopped:
            print(stopped)
        print(f"{held} of {len(exercises)} exercises hold.")
    return 0 if held == len(exercises) and not stopped else 1
