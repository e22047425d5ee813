"""`refresh`: write the exercises' stubs into lessons, run them, and save their outputs as they are committed."""

import argparse
import time
from pathlib import Path

import nbformat
from nbclient.exceptions import CellExecutionError, DeadKernelError

from scratch_ddp.commands.notebooks import exercise_cells, find_lesson, lesson_paths, run
from scratch_ddp.commands.outputs import clean_notebook, clear_outputs, to_text


def refresh(path: Path) -> bool:
    """Run one notebook with its stubs as the references have them now, and save it; returns whether the file changed.

    Raises what `run` and `exercise_cells` do; the file is then as it was.
    """
    before = path.read_text(encoding="utf-8")
    notebook = nbformat.reads(before, as_version=4)
    for exercise, cell in exercise_cells(notebook, path.parent):
        cell.source = exercise.stub_cell()
    clear_outputs(notebook)
    run(notebook, path.parent)
    clean_notebook(notebook)
    if (after := to_text(notebook)) != before:
        path.write_text(after, encoding="utf-8")
    return after != before


def _notebook(name: str) -> Path:
    """The lesson of that name, or the notebook at that path if a `lesson_….py` stands beside it.

    The path of a learner's copy means its lesson: the stubs would overwrite the answers.
    """
    path = Path(name).absolute()
    return path if path.is_file() and any(path.parent.glob("lesson_*.py")) else find_lesson(name)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python3 -m scratch_ddp refresh", description=__doc__)
    parser.add_argument("lessons", nargs="*", metavar="LESSON", help="02, or a notebook's path; without one: all")
    paths = [_notebook(name) for name in parser.parse_args(arguments).lessons] or lesson_paths()
    failed = 0
    for path in paths:
        started = time.monotonic()
        print(f"{path.stem} … ", end="", flush=True)
        try:
            done = "saved" if refresh(path) else "unchanged"
        except (CellExecutionError, DeadKernelError) as failure:
            failed, done = failed + 1, f"left as it was: {failure}"
        print(f"{done}, {time.monotonic() - started:.0f} s", flush=True)
    return 1 if failed else 0
