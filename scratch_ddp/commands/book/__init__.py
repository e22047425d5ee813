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
from scratch_ddp.commands.notebooks import NOTEBOOKS, ROOT, exercise_cells, lesson_paths
from scratch_ddp.course.exercise import all_exercises
from scratch_ddp.course.plots import moving

HERE = Path(__file__).parent
HOME = ROOT / "README.md"
PICTURES = ROOT / "assets"
FIRST_PAGE = '<meta http-equiv="refresh" content="0; url=README.html">\n'
SOLUTION = "<details class='solution'><summary>Solution</summary>\n\n```python\n{}\n```\n\n</details>"
CONTENTS = "\n\n```{{toctree}}\n:hidden:\n:caption: {}\n\n{}\n```\n"


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
    shutil.copytree(PICTURES, folder / PICTURES.relative_to(ROOT))
    shutil.copytree(ROOT / "scratch_ddp", folder / "scratch_ddp", ignore=shutil.ignore_patterns("*.md", "__pycache__"))
    for path in [*lesson_paths(), *pages()]:
        text = path.read_text(encoding="utf-8")
        text = page_of(text) if path.suffix == ".ipynb" else text
        target = folder / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text + contents() if path == HOME else text, encoding="utf-8")


def pages() -> list[Path]:
    """The pages beside the lessons, in the order of the table of contents."""
    first = [NOTEBOOKS / f"{name}.md" for name in ("map", "glossary", "symptoms")]
    of_the_package = [ROOT / "scratch_ddp" / folder / "README.md" for folder in ("", "cells", "benchmark")]
    return [HOME, *first, *sorted(set(NOTEBOOKS.glob("*.md")) - {*first}), *of_the_package]


def contents() -> str:
    """The site's table of contents, which also says what is next and previous."""
    parts = {"Lessons": lesson_paths(), "Pages": pages()[1:]}
    names = {
        caption: "\n".join(str(path.relative_to(ROOT).with_suffix("")) for path in paths)
        for caption, paths in parts.items()
    }
    return "".join(CONTENTS.format(caption, some) for caption, some in names.items())


def page_of(text: str) -> str:
    """A lesson's notebook as a page of the book: with its moving figures, and each solution behind its check."""
    notebook = nbformat.reads(text, as_version=4)
    notebook.metadata.language_info = {"name": "python", "pygments_lexer": "python"}
    for cell in list(notebook.cells):
        for tag in cell.metadata.get("tags", []):
            if tag.startswith(moving.TAG):
                figure = new_markdown_cell(moving.html(tag.removeprefix(moving.TAG)))
                notebook.cells.insert(notebook.cells.index(cell) + 1, figure)
    for name, stub in exercise_cells(notebook).items():
        below = range(notebook.cells.index(stub) + 1, len(notebook.cells))
        check = next(at for at in below if f"check({name}" in notebook.cells[at].source)
        solution = SOLUTION.format(all_exercises()[name].answer_cell())
        notebook.cells.insert(check + 1, new_markdown_cell(solution))
    return nbformat.writes(notebook)
