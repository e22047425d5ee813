"""Exercises in notebooks: a cell tagged `exercise:NAME` holds the stub of exercise NAME, and nothing else."""

from nbformat import NotebookNode

from scratch_ddp.course.exercise import all_exercises

TAG = "exercise:"


def exercise_cells(notebook: NotebookNode) -> dict[str, NotebookNode]:
    """The notebook's tagged cells by the name of their exercise. Raises ValueError for a name that no exercise has."""
    cells: dict[str, NotebookNode] = {}
    for cell in notebook.cells:
        for tag in cell.metadata.get("tags", []):
            if not tag.startswith(TAG):
                continue
            name = tag.removeprefix(TAG)
            if name not in all_exercises() or name in cells:
                raise ValueError(f"tag {tag!r}: {'a second cell' if name in cells else 'no exercise of that name'}")
            cells[name] = cell
    return cells


def write_stubs(notebook: NotebookNode) -> list[str]:
    """Make every tagged cell the stub of its exercise, in place; returns the names of those that changed."""
    return _write(notebook, {name: exercise.stub_cell() for name, exercise in all_exercises().items()})


def write_answers(notebook: NotebookNode) -> list[str]:
    """Put the reference answer into every tagged cell, in place; returns the names of those that changed."""
    return _write(notebook, {name: exercise.answer_cell() for name, exercise in all_exercises().items()})


def _write(notebook: NotebookNode, sources: dict[str, str]) -> list[str]:
    changed = [name for name, cell in exercise_cells(notebook).items() if cell.source != sources[name]]
    for name in changed:
        exercise_cells(notebook)[name].source = sources[name]
    return changed
