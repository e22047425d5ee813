"""Lessons and other notebooks: found by name, run without a browser, and their exercises' cells found by their tags."""

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from jupyter_client.manager import AsyncKernelManager, KernelManager
from nbclient import NotebookClient
from nbformat import NotebookNode

from scratch_ddp.commands.environment import ROOT

NOTEBOOKS = ROOT / "notebooks"
COPIES = ROOT / "my_lessons"  # beside the originals, so that ../assets/… is the same folder for both
EXERCISE = "exercise:"  # a cell tagged `exercise:NAME` holds the stub of exercise NAME, and nothing else


def lesson_paths() -> list[Path]:
    """The lessons in the order of their numbers: 14_….ipynb, then 14b_….ipynb."""
    return sorted(path for path in NOTEBOOKS.glob("*.ipynb") if re.match(r"\d\d[a-z]?_", path.name))


def find_lesson(name: str) -> Path:
    """The lesson that `2`, `02`, `02_inside_all_reduce`, its file name or its path means; `14b` is not `14`."""
    stem = Path(name).name.removesuffix(".ipynb")
    for path in lesson_paths():
        if stem == path.stem or stem.zfill(2) == path.stem.partition("_")[0]:
            return path
    raise SystemExit(f"There is no lesson {name!r}. The lessons: {', '.join(p.stem for p in lesson_paths())}.")


class _OverUnixSockets:
    """Talk to the kernel through files in a private folder.

    A manager chooses free TCP ports, and its kernel binds them a second later. Ranks that start in between, here or in
    another notebook, may be given the same ports; the kernel then dies at its start.
    """

    def __init__(self, **traits: Any):
        # The kernel's folder would do as well, but the path of a socket has room for about 100 bytes only.
        self._folder = tempfile.TemporaryDirectory(prefix="kernel-", ignore_cleanup_errors=True)
        super().__init__(transport="ipc", ip=f"{self._folder.name}/socket", **traits)


class SocketKernelManager(_OverUnixSockets, KernelManager):
    pass


class AsyncSocketKernelManager(_OverUnixSockets, AsyncKernelManager):
    pass


def run(notebook: NotebookNode, folder: Path, keep_going: bool = False, cell_timeout: float | None = None) -> None:
    """Run all cells in order, in `folder`; their outputs replace the old ones, in place.

    A cell that raises ends the run with nbclient's CellExecutionError, which shows it, unless it is tagged
    `raises-exception` or `keep_going` is set. A cell that takes longer than `cell_timeout` seconds is interrupted,
    which makes it one that raises. Raises DeadKernelError if the kernel dies.
    """
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
    )
    # What cells write is in their outputs; the kernel's own terminal would only get some of it a second time.
    client.execute(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def exercise_cells(notebook: NotebookNode, folder: Path = Path()) -> list[tuple[Any, NotebookNode]]:
    """The notebook's tagged cells, each with its exercise, of the package or of a `lesson_….py` in `folder`.

    Raises KeyError for a name that no exercise has.
    """
    from scratch_ddp.course.exercise import all_exercises  # it imports torch, which takes seconds

    tagged = [(tag, cell) for cell in notebook.cells for tag in cell.metadata.get("tags", [])]
    exercises = all_exercises(folder)
    return [(exercises[tag.removeprefix(EXERCISE)], cell) for tag, cell in tagged if tag.startswith(EXERCISE)]
