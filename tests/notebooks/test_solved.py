"""Every lesson's exercises with the reference answers in their cells: every check passes, with what the page has above.

Strict nbval runs all cells of a lesson; here only those run that have to do with its exercises.
"""

import re
import symtable

import nbformat
import pytest
from nbformat import NotebookNode

from scratch_ddp.commands.grade import CHECK, HOLDS, exercises_of
from scratch_ddp.commands.notebooks import exercise_cells, lesson_paths
from tests.kernel import Kernel

RANKS = ("%load_ext", "%dist_init", "%dist_shutdown")


@pytest.mark.parametrize("path", lesson_paths(), ids=lambda path: path.stem)
def test_with_the_reference_answers_every_check_of_the_lesson_passes(path, _shared_kernel):
    notebook = nbformat.read(path, as_version=4)
    exercises = set()
    for exercise, cell in exercise_cells(notebook):
        cell.source = exercise.answer_cell()
        exercises.add(exercise.name)
    notebook.cells = cells_about_exercises(notebook)
    run(_shared_kernel, notebook.cells)
    verdicts = exercises_of(notebook)
    assert {verdict.name for verdict in verdicts} == exercises
    assert all(verdict.status == HOLDS for verdict in verdicts), verdicts


def run(kernel: Kernel, cells: list[NotebookNode]) -> None:
    """Run cells in a kernel that lessons share; each has ranks of its own, and what it defines is on these."""
    try:
        for number, cell in enumerate(cells, start=1):
            result = kernel.run(cell.source, timeout=120)
            assert not result.error, result.traceback
            cell.execution_count = number
            cell.outputs = [{"output_type": output["type"], **output} for output in result.outputs]
    finally:
        kernel.run("%dist_shutdown")


def cells_about_exercises(notebook: NotebookNode) -> list[NotebookNode]:
    """The cells that start and end ranks, check an exercise, and the last above them to define what they use."""
    needed, kept, ranks = set(), [], ""
    for cell in reversed([cell for cell in notebook.cells if cell.cell_type == "code"]):
        if cell.source.startswith("%%writefile"):
            continue  # what it defines is in a file
        defined, used = names_in(cell.source)
        about_ranks = cell.source.startswith(RANKS)
        if about_ranks and cell.source == ranks:
            continue  # the ranks that the lesson lost in between are still there
        ranks = cell.source if about_ranks else ranks
        if about_ranks or CHECK.search(cell.source) or defined & needed:
            needed = (needed | used) - defined
            kept.append(cell)
    return kept[::-1]


def names_in(source: str) -> tuple[set[str], set[str]]:
    """The notebook's names that a cell defines, and those that it reads, also in its functions."""
    python = re.sub(r"^( *)[%!].*", r"\1pass", source, flags=re.MULTILINE)
    top = symtable.symtable(python, "cell", "exec")
    defined = {name.get_name() for name in top.get_symbols() if name.is_assigned() or name.is_imported()}
    used, tables = set(), [top]
    while tables:
        table = tables.pop()
        used |= {name.get_name() for name in table.get_symbols() if name.is_referenced() and name.is_global()}
        tables += table.get_children()
    return defined, used
