"""What a lesson looks like on the page: cells that fit on a screen, lines that fit into a cell."""

import nbformat
import pytest

from scratch_ddp.commands.notebooks import lesson_paths

LINES = 25
WIDTH = 103  # characters that JupyterLab shows of a line in a window of 1250 pixels


@pytest.mark.parametrize("path", lesson_paths(), ids=lambda path: path.stem)
def test_code_fits(path):
    for number, cell in enumerate(nbformat.read(path, as_version=4).cells, start=1):
        lines = cell.source.splitlines() if cell.cell_type == "code" else []
        assert len(lines) <= LINES, f"cell {number} has {len(lines)} lines"
        wide = [line for line in lines if len(line) > WIDTH]
        assert not wide, f"cell {number}: {wide}"
