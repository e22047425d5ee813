"""What Sphinx makes the site of: the lessons as they are committed, with each solution folded away, and the pages.

Every file keeps its place in the clone, so that the links between them stay as they are. README.md is the first page.
"""

import os
import re
import shutil
from pathlib import Path

import nbformat
from nbformat import NotebookNode
from nbformat.v4 import new_markdown_cell

from scratch_ddp.commands.lessons import NOTEBOOKS, ROOT, lesson_paths
from scratch_ddp.commands.stubs import exercise_cells
from scratch_ddp.course.exercise import all_exercises

HOME = ROOT / "README.md"
ENGINEERS = ROOT / "scratch_ddp" / "README.md"
FIGURES = ROOT / "scratch_ddp" / "benchmark" / "README.md"
PICTURES = ROOT / "assets"
LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s#]+)(?P<anchor>#[^)\s]*)?\)")
LEXER = "rank-cell"  # conf.py defines it
SOLUTION = "<details class='solution'><summary>Solution</summary>\n\n```{lexer}\n{source}\n```\n\n</details>"
CONTENTS = "\n\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{names}\n```\n"


def write_sources(folder: Path) -> None:
    """Write all sources into the folder."""
    shutil.copytree(PICTURES, folder / PICTURES.relative_to(ROOT))
    for path in pages():
        text = with_links(path.read_text(encoding="utf-8"), path)
        if path == HOME:
            text += contents()
        _write(folder / place(path), text)
    for path in lesson_paths():
        notebook = nbformat.read(path, as_version=4)
        prepare(notebook, path)
        _write(folder / place(path), nbformat.writes(notebook))


def pages() -> list[Path]:
    """The pages beside the lessons, in the order of the table of contents."""
    first = [NOTEBOOKS / f"{name}.md" for name in ("map", "glossary", "symptoms")]
    return [HOME, *first, *sorted(set(NOTEBOOKS.glob("*.md")) - {*first}), ENGINEERS, FIGURES]


def place(path: Path) -> Path:
    """Where a file of the clone stands among the sources."""
    return Path("index.md") if path == HOME else path.relative_to(ROOT)


def contents() -> str:
    """The site's table of contents, which also says what is next and previous."""
    parts = {"Lessons": lesson_paths(), "Pages": pages()[1:]}
    names = {caption: "\n".join(str(place(path).with_suffix("")) for path in paths) for caption, paths in parts.items()}
    return "".join(CONTENTS.format(caption=caption, names=some) for caption, some in names.items())


def prepare(notebook: NotebookNode, path: Path) -> None:
    """Make a lesson's notebook a page of the book, in place: solutions, links, and a lexer that knows rank cells."""
    notebook.metadata.language_info = {"name": "python", "pygments_lexer": LEXER}
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = with_links(cell.source, path)
    for name, cell in exercise_cells(notebook).items():
        notebook.cells.insert(_after_check(notebook.cells, cell, name), new_markdown_cell(solution(name)))


def solution(name: str) -> str:
    """An exercise's reference answer, folded away."""
    return SOLUTION.format(lexer=LEXER, source=all_exercises()[name].answer_cell())


def with_links(text: str, page: Path) -> str:
    """A page's markdown, whose links to files that the book does not have lead to the repository.

    Where that is unknown, which is anywhere but in GitHub's workflows, the links' texts remain.
    """

    def link(found: re.Match) -> str:
        path = Path(os.path.normpath(page.parent / found["target"]))
        if path == HOME:
            start = os.path.relpath(ROOT / place(HOME), page.parent)
            return f"[{found['text']}]({start}{found['anchor'] or ''})"
        if not path.exists() or path in [*pages(), *lesson_paths()] or PICTURES in path.parents:
            return found[0]
        address = repository()
        return f"[{found['text']}]({address}/{path.relative_to(ROOT)})" if address else found["text"]

    return LINK.sub(link, text)


def repository() -> str:
    """Where GitHub shows this commit's files, or nothing outside of its workflows."""
    parts = [os.environ.get(f"GITHUB_{name}") for name in ("SERVER_URL", "REPOSITORY", "SHA")]
    return "{}/{}/blob/{}".format(*parts) if all(parts) else ""


def _after_check(cells: list[NotebookNode], stub: NotebookNode, name: str) -> int:
    """The place behind the first cell after the stub that checks the exercise, or behind the stub if there is none."""
    first = cells.index(stub)
    checks = (at for at, cell in enumerate(cells) if at > first and f"check({name}" in cell.source)
    return next(checks, first) + 1


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
