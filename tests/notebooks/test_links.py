"""Links in the pages and lessons lead somewhere: the file is there, and the heading in it."""

import re
from pathlib import Path

import nbformat
import pytest

from scratch_ddp.commands.notebooks import NOTEBOOKS, ROOT, lesson_paths

LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)
OF_THE_PACKAGE = [ROOT / "scratch_ddp" / folder / "README.md" for folder in ("", "cells", "benchmark")]
PAGES = [ROOT / "README.md", *OF_THE_PACKAGE, *sorted(NOTEBOOKS.glob("*.md")), *lesson_paths()]


def markdown_of(path: Path) -> str:
    if path.suffix != ".ipynb":
        return path.read_text()
    return "\n\n".join(cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "markdown")


def anchors_of(path: Path) -> set[str]:
    """A heading's anchor as both JupyterLab and GitHub write it, which they do alike for lower-case words only."""
    return {heading.replace(" ", "-") for heading in HEADING.findall(markdown_of(path))}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for link in LINK.findall(markdown_of(page)):
        if "://" in link or link.startswith(("mailto:", "attachment:")):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists() and (not anchor or anchor in anchors_of(target)), link
        # Learners' copies stand in a folder beside notebooks/, so a link of theirs must not name that folder.
        assert NOTEBOOKS not in page.parents or not re.match(r"(\.\./)?notebooks/", link), link


def test_the_readme_lists_every_lesson():
    text = (ROOT / "README.md").read_text()
    listed = re.findall(r"^\| (\d\d[a-z]?) \| \[.+?\]\(notebooks/(\S+?)\) \|", text, re.MULTILINE)
    assert [name for _, name in listed] == [path.name for path in lesson_paths()]
    assert [number for number, _ in listed] == sorted({number for number, _ in listed})
