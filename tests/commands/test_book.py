"""What the book is built from. Sphinx itself runs in the workflow that publishes the book, on the same sources."""

import re
from fnmatch import fnmatchcase

import nbformat
from pygments.lexers import PythonLexer
from pygments.token import Error

from scratch_ddp.commands import book
from scratch_ddp.commands.notebooks import NOTEBOOKS, ROOT, exercise_cells, lesson_paths


def test_every_page_is_in_the_contents_and_each_solution_is_folded_away_behind_its_check(tmp_path):
    book.write_sources(tmp_path)
    patterns = re.findall(r"^(?:notebooks|scratch_ddp)/\S+$", (tmp_path / "README.md").read_text(), re.MULTILINE)
    for path in [*lesson_paths(), *NOTEBOOKS.glob("*.md"), *(ROOT / "scratch_ddp").rglob("*.md")]:
        page = path.relative_to(ROOT)
        assert (tmp_path / page).is_file() and any(fnmatchcase(str(page.with_suffix("")), each) for each in patterns)
    assert (tmp_path / "scratch_ddp" / "minimal" / "ddp.py").is_file()
    for path in lesson_paths():
        before = nbformat.read(path, as_version=4)
        after = nbformat.read(tmp_path / "notebooks" / path.name, as_version=4)
        cells = [cell for cell in after.cells if not cell.source.startswith('<div class="moving"')]
        solutions = [index for index, cell in enumerate(cells) if "class='solution'" in cell.source]
        for (exercise, stub), index in zip(exercise_cells(before), solutions, strict=True):
            assert stub.source in [cell.source for cell in cells[:index]]
            assert f"check({exercise.name}" in cells[index - 1].source
            assert exercise.answer_cell() in cells[index].source
        rest = [cell for index, cell in enumerate(cells) if index not in solutions]
        assert [cell.get("outputs") for cell in rest] == [cell.get("outputs") for cell in before.cells]
        code = [cell.source for cell in rest if cell.cell_type == "code"]
        wrong = [kind for source in code for kind, _ in PythonLexer().get_tokens(source) if kind is Error]
        assert not wrong, "magics too must be tokens of Python, or Sphinx warns"
