"""`grade`: which exercises of a learner's notebook hold, whatever else is wrong with it."""

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_output

from scratch_ddp.commands import grade as grading
from scratch_ddp.commands import outputs
from scratch_ddp.commands.grade import FAILS, HOLDS, NOT_REACHED, NOT_WRITTEN
from tests.notebooks.files import save, stream

NAME_ERROR = new_output("error", ename="NameError", evalue="f", traceback=[])


@pytest.mark.parametrize(
    ("said", "status", "lines"),
    [
        (stream("✓ value   ✓ agreement   ← ranks 0–3\n"), HOLDS, ["✓ value   ✓ agreement"]),
        (stream("✓ value\n✗ cost    4 messages\n↑ ranks 0–3\n"), FAILS, ["✓ value", "✗ cost    4 messages"]),
        (stream("· Rank 0 printed:\n·   ✓ all is well\n✗ value   wrong\n"), FAILS, ["✗ value   wrong"]),
        (stream("not written yet   ← ranks 0–3\n"), NOT_WRITTEN, []),
        (stream(""), FAILS, ["the check said nothing"]),
        (NAME_ERROR, FAILS, ["NameError: f"]),
        (new_output("display_data", data={"text/plain": "✓ value"}), HOLDS, ["✓ value"]),
    ],
)
def test_what_a_check_says_becomes_a_verdict(said, status, lines):
    cell = new_code_cell("check(f)", outputs=[said], execution_count=1)
    assert grading.verdict(cell) == (status, lines)
    cell.execution_count = None
    assert grading.verdict(cell) == (NOT_REACHED, [])


def test_grading_goes_on_after_what_fails_never_ends_dies_or_is_no_notebook(tmp_path, capsys):
    own = "def check(f):\n    print(f())\n"  # a check that needs no ranks
    dies = save(tmp_path / "anna.ipynb", own, "import os\nos._exit(3)", "check(f)")
    notebook = nbformat.read(dies, as_version=4)
    notebook.cells[2].outputs = [stream("✓ value\n")]  # what an earlier run saved does not count
    dies.write_text(outputs.to_text(notebook))
    (tmp_path / "ben.ipynb").write_text("not json")
    cells = [own, "def a(): return '✓ value'", "check(a)", "raise RuntimeError('mine')"]
    cells += ["def b(): return '✗ cost    4 messages, budget 3'", "check(b)", "check(never_defined)"]
    cells += ["# check(no)\nimport time\ntime.sleep(60)", "def c(): return 'not written yet'\ncheck(c)"]
    mine = save(tmp_path / "cem.ipynb", *cells)
    files = [dies, tmp_path / "ben.ipynb", tmp_path / "nowhere.ipynb", mine]
    before = mine.read_bytes()
    assert grading.main(["--cell-timeout", "2", *map(str, files)]) == 1
    assert mine.read_bytes() == before
    anna, *others, cem = capsys.readouterr().out.strip().split("\n\n")
    assert "kernel died" in anna and f"{NOT_REACHED} f" in anna and f"{dies}: 0 of 1 exercises hold." in anna
    assert len(others) == 2 and all("can't be graded" in each for each in others)
    verdicts = [f"{HOLDS:12}a", f"{FAILS:12}b", f"{FAILS:12}never_defined", "not written c"]
    said = [line for line in cem.splitlines() if not line.startswith(" ")]
    assert said == [*verdicts, f"{mine}: 1 of 4 exercises hold."]
    assert "4 messages, budget 3" in cem
