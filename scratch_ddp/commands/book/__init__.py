"""`book`: all lessons with their saved outputs as a site of static pages, to be read without installing anything.

Sphinx makes it of the lessons as they are committed, with each solution folded away, and of the pages. Some figures
move there. Every file keeps its place in the clone, so that links stay as they are: between pages, and to the package's
files, which the site offers for download. Other links are text. README.md is the first page.
"""

import argparse
import shutil
import subprocess
import tempfile
from pathlib import Path

import nbformat
from nbformat.v4 import new_markdown_cell

from scratch_ddp.commands import environment
from scratch_ddp.commands.notebooks import ROOT, exercise_cells, lesson_paths
from scratch_ddp.course.plots import moving

HERE = Path(__file__).parent
FIRST_PAGE = '<meta http-equiv="refresh" content="0; url=README.html">\n'
SOLUTION = "<details class='solution'><summary>Solution</summary>\n\n```python\n{}\n```\n\n</details>"
CONTENTS = """

```{toctree}
:hidden:
:glob:
:caption: Lessons

notebooks/[0-9]*
```

```{toctree}
:hidden:
:glob:
:caption: Pages

notebooks/map
notebooks/glossary
notebooks/symptoms
notebooks/[a-zA-Z]*
scratch_ddp/**
```
"""


def main(arguments: list[str]) -> int:
    """Build the site; returns 1 if Sphinx warns of anything, such as a link that leads nowhere."""
    parser = argparse.ArgumentParser(prog="python3 -m scratch_ddp book", description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "book", help="of the site (default: book)")
    site = parser.parse_args(arguments).folder.absolute()
    venv = Path(f"{environment.folder()}-book")  # Sphinx has an environment of its own
    environment.update(venv, HERE / "requirements.txt")
    with tempfile.TemporaryDirectory() as folder:
        write_sources(Path(folder))
        sphinx = [str(environment.python_of(venv)), "-m", "sphinx", "--fresh-env", "--fail-on-warning", "--quiet"]
        status = subprocess.call([*sphinx, "-c", str(HERE), "-d", f"{folder}/.cache", folder, str(site)])
    if status == 0:
        (site / moving.LIBRARY).write_text(moving.library(), encoding="utf-8")
        (site / "index.html").write_text(FIRST_PAGE)
        print(f"The book is in {site}: open index.html in a browser.", flush=True)
    return 1 if status else 0


def write_sources(folder: Path) -> None:
    """Write what Sphinx reads into the folder."""
    others = shutil.ignore_patterns("*.ipynb", "__pycache__", ".ipynb_checkpoints")
    for name in ("assets", "scratch_ddp", "notebooks"):
        shutil.copytree(ROOT / name, folder / name, ignore=others)
    (folder / "README.md").write_text((ROOT / "README.md").read_text(encoding="utf-8") + CONTENTS, encoding="utf-8")
    for path in lesson_paths():
        (folder / "notebooks" / path.name).write_text(page_of(path), encoding="utf-8")


def page_of(lesson: Path) -> str:
    """A lesson's notebook as a page of the book: with its moving figures, and each solution behind its check."""
    notebook = nbformat.read(lesson, as_version=4)
    notebook.metadata.language_info = {"name": "python", "pygments_lexer": "python"}
    for cell in list(notebook.cells):
        for tag in cell.metadata.get("tags", []):
            if tag.startswith(moving.TAG):
                figure = new_markdown_cell(moving.html(tag.removeprefix(moving.TAG)))
                notebook.cells.insert(notebook.cells.index(cell) + 1, figure)
    for exercise, stub in exercise_cells(notebook):
        below = range(notebook.cells.index(stub) + 1, len(notebook.cells))
        check = next(at for at in below if f"check({exercise.name}" in notebook.cells[at].source)
        notebook.cells.insert(check + 1, new_markdown_cell(SOLUTION.format(exercise.answer_cell())))
    return nbformat.writes(notebook)
