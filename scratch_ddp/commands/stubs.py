"""Exercises in notebooks: a cell tagged `exercise:NAME` holds the stub of exercise NAME, and nothing else.

`folder` is where the notebook is: exercises are also found in its `lesson_….py`.
"""

from collections.abc import Callable
from pathlib import Path

from nbformat import NotebookNode

from scratch_ddp.course.exercise import Exercise, all_exercises

TAG = "exercise:"


def exercise_cells(notebook: NotebookNode, folder: Path = Path()) -> dict[str, NotebookNode]:
    """The notebook's tagged cells by the name of their exercise. Raises ValueError for a name that no exercise has."""
    cells: dict[str, NotebookNode] = {}
    for cell in notebook.cells:
        for tag in cell.metadata.get("tags", []):
            if not tag.startswith(TAG):
                continue
            name = tag.removeprefix(TAG)
            if name not in all_exercises(folder) or name in cells:
                raise ValueError(f"tag {tag!r}: {'a second cell' if name in cells else 'no exercise of that name'}")
            cells[name] = cell
    return cells


def write_stubs(notebook: NotebookNode, folder: Path = Path()) -> list[str]:
    """Make every tagged cell the stub of its exercise, in place; returns the names of those that changed."""
    return _write(notebook, folder, Exercise.stub_cell)


def write_answers(notebook: NotebookNode, folder: Path = Path()) -> list[str]:
    """Put the reference answer into every tagged cell, in place; returns the names of those that changed."""
    return _write(notebook, folder, Exercise.answer_cell)


def _write(notebook: NotebookNode, folder: Path, source_of: Callable[[Exercise], str]) -> list[str]:
    changed = []
    for name, cell in exercise_cells(notebook, folder).items():
        source = source_of(all_exercises(folder)[name])
        if cell.source != source:
            cell.source = source
            changed.append(name)
    return changed
