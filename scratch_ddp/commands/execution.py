"""Run a notebook without a browser, on the kernel of this environment."""

import re
import subprocess
from pathlib import Path

from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, DeadKernelError
from nbformat import NotebookNode

from scratch_ddp.commands.kernels import AsyncSocketKernelManager

ANSI_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class CellFailed(Exception):
    """A cell raised, or the kernel died in it; the message names the cell."""


def run(notebook: NotebookNode, folder: Path, keep_going: bool = False, cell_timeout: float | None = None) -> None:
    """Run all cells in order, in `folder`; their outputs replace the old ones, in place.

    A cell that raises ends the run with CellFailed, unless it is tagged `raises-exception` or `keep_going` is set. A
    cell that takes longer than `cell_timeout` seconds is interrupted, which makes it one that raises. A kernel that
    dies is CellFailed in any case.
    """
    reached = []
    client = NotebookClient(
        notebook,
        resources={"metadata": {"path": str(folder)}},
        kernel_name="python3",
        kernel_manager_class=AsyncSocketKernelManager,
        allow_errors=keep_going,
        timeout=cell_timeout,
        interrupt_on_timeout=True,
        iopub_timeout=60,
        record_timing=False,
        store_widget_state=False,
        on_cell_execute=lambda cell, cell_index: reached.append(cell_index),
    )
    try:
        # What cells write is in their outputs; the kernel's own terminal would only get some of it a second time.
        client.execute(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    except CellExecutionError as error:
        raise CellFailed(f"{name_of(notebook, reached[-1])} failed:\n{ANSI_COLOUR.sub('', error.traceback)}") from None
    except DeadKernelError:
        where = name_of(notebook, reached[-1]) if reached else "the start"
        raise CellFailed(f"The kernel died in {where}.") from None


def name_of(notebook: NotebookNode, index: int) -> str:
    """`cell 7 (dist.all_reduce(x))`: its place, counted as JupyterLab lists the cells, and its first line."""
    lines = notebook.cells[index].source.strip().splitlines() or [""]
    return f"cell {index + 1} ({lines[0][:60]})"
