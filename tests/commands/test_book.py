"""What the book is built from. Sphinx itself runs in the workflow that publishes the book, on the same sources."""

import re
from pathlib import Path

import nbformat
import pytest

from scratch_ddp.commands.book import command, sources
from scratch_ddp.commands.book.links import complaints
from scratch_ddp.commands.lessons import NOTEBOOKS, lesson_paths
from scratch_ddp.commands.stubs import exercise_cells
from scratch_ddp.course.exercise import all_exercises


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("book")
    sources.write_sources(folder)
    return folder


@pytest.mark.parametrize("path", lesson_paths(), ids=lambda path: path.stem)
def test_each_solution_is_folded_away_behind_its_check(written, path):
    """Nothing else is added, and outputs are those that are committed."""
    before = nbformat.read(path, as_version=4)
    after = nbformat.read(written / "notebooks" / path.name, as_version=4)
    solutions = [index for index, cell in enumerate(after.cells) if "class='solution'" in cell.source]
    exercises = list(exercise_cells(before))
    assert len(solutions) == len(exercises) == len(after.cells) - len(before.cells)
    for name, index in zip(exercises, solutions, strict=True):
        assert all_exercises()[name].stub_cell() in [cell.source for cell in after.cells[:index]]
        assert f"check({name}" in after.cells[index - 1].source
        assert all_exercises()[name].answer_cell() in after.cells[index].source
        assert after.cells[index].source.startswith("<details") and " open" not in after.cells[index].source[:40]
    rest = [cell for index, cell in enumerate(after.cells) if index not in solutions]
    assert [cell.get("outputs") for cell in rest] == [cell.get("outputs") for cell in before.cells]


def test_every_lesson_and_page_is_in_the_table_of_contents(written):
    contents = (written / "index.md").read_text()
    for path in [*lesson_paths(), *NOTEBOOKS.glob("*.md")]:
        assert f"\nnotebooks/{path.stem}\n" in contents
        assert (written / "notebooks" / path.name).is_file()


def test_links_between_sources_lead_to_files(written):
    for path in written.rglob("*.md"):
        for found in sources.LINK.finditer(path.read_text()):
            if not re.match(r"[a-z]+:", found["target"]):
                assert (path.parent / found["target"]).exists(), f"{path.name}: {found[0]}"


def test_code_is_linked_where_the_repository_is_known_only(monkeypatch):
    page, text = NOTEBOOKS / "map.md", "[the loop](../scratch_ddp/training/loop.py)"
    for name in ("SERVER_URL", "REPOSITORY", "SHA"):
        monkeypatch.delenv(f"GITHUB_{name}", raising=False)
    assert sources.with_links(text, page) == "the loop"
    for name, value in {"SERVER_URL": "https://github.com", "REPOSITORY": "a/b", "SHA": "1f"}.items():
        monkeypatch.setenv(f"GITHUB_{name}", value)
    assert sources.with_links(text, page) == "[the loop](https://github.com/a/b/blob/1f/scratch_ddp/training/loop.py)"
    assert sources.with_links("[start](../README.md#the-lessons)", page) == "[start](../index.md#the-lessons)"
    assert sources.with_links("[two](02_inside_all_reduce.ipynb)", page) == "[two](02_inside_all_reduce.ipynb)"


def test_a_broken_link_and_a_thing_from_elsewhere_are_named(tmp_path):
    (tmp_path / "a.html").write_text('<h2 id="here"></h2><a href="b.html#there">x</a><a href="#here">x</a>')
    (tmp_path / "b.html").write_text('<a href="c.html">x</a><script src="https://cdn.example/x.js"></script>')
    assert complaints(tmp_path) == [
        "a.html: b.html#there leads nowhere",
        "b.html: c.html leads nowhere",
        "b.html: loads https://cdn.example/x.js from elsewhere",
    ]


def test_a_dead_link_or_a_warning_of_sphinx_fails_the_build(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "write_sources", lambda folder: None)
    (tmp_path / "index.html").write_text("<a href='gone.html'></a>")
    ran, status = [], [0, 0, 1]

    def call(arguments):
        ran.append(arguments)
        return status.pop(0)

    monkeypatch.setattr(command.subprocess, "call", call)
    assert command.build(tmp_path, Path("python")) == 1
    assert "index.html: gone.html leads nowhere" in capsys.readouterr().out
    (tmp_path / "index.html").write_text("<a href='https://example.org'></a>")
    assert command.build(tmp_path, Path("python")) == 0
    assert command.build(tmp_path, Path("python")) == 1
    assert "--fail-on-warning" in ran[0]
