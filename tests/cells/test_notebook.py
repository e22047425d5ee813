"""Rank cells in a saved notebook: small, nothing but what ranks said, and failing where a Python cell would."""

import re

import nbformat
from nbclient import NotebookClient

from scratch_ddp.commands.notebooks import AsyncSocketKernelManager
from scratch_ddp.commands.outputs import clean_outputs


def executed(*sources: str, **options):
    """A notebook with these cells after `%dist_init -n 4`, executed as Run All does. A source may be (source, tag)."""
    notebook = nbformat.v4.new_notebook()
    for source in ("%load_ext scratch_ddp", "%dist_init -n 4", *sources):
        text, tags = source if isinstance(source, tuple) else (source, None)
        notebook.cells.append(nbformat.v4.new_code_cell(text, metadata={"tags": [tags]} if tags else {}))
    client = NotebookClient(
        notebook, timeout=60, kernel_name="python3", kernel_manager_class=AsyncSocketKernelManager, **options
    )
    client.execute()
    return notebook


def outputs_of(cell):
    """As a reader sees them: on a busy machine a passing line may have been there, and wiped out."""
    return [(out.output_type, out.get("text") or out.get("ename")) for out in clean_outputs(cell.outputs)]


def test_sixty_cells_are_a_small_file_with_nothing_else_in_it(tmp_path):
    cells = ["print('rank', rank)", "total = torch.ones(2)\ndist.all_reduce(total)\ntotal", "x = 1"] * 20
    notebook = executed(*cells)
    path = tmp_path / "saved.ipynb"
    nbformat.write(notebook, path)
    assert path.stat().st_size < 60_000
    assert {out.output_type for cell in notebook.cells for out in cell.outputs} == {"stream"}
    assert outputs_of(notebook.cells[3]) == [("stream", "tensor([4., 4.])   ← ranks 0–3\n")]
    assert "application/" not in path.read_text()


def test_a_traceback_names_its_cell_as_the_notebook_does():
    failing = ("1 / 0", "%%rank [1]\n1 / 0")
    cells = executed("x = 1", *[(code, "raises-exception") for code in failing]).cells[3:]
    assert [cell.execution_count for cell in cells] == [4, 5]
    for cell, number in zip(cells, ("In[4]", "In[5]"), strict=True):
        lines = re.sub(r"\x1b\[[\d;]*m", "", "\n".join(cell.outputs[-1].traceback))
        assert re.findall(r"In\[\d+\]", lines) == [number]
