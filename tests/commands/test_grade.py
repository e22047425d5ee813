"""`grade`: which exercises of a learner's notebook hold, whatever else is wrong with it."""

import json

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_output

from scratch_ddp.commands import grade as grading
from scratch_ddp.commands import outputs
from scratch_ddp.commands.grade import FAILS, HOLDS, MISSING, NOT_REACHED, NOT_WRITTEN
from scratch_ddp.commands.notebooks import UsageError
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


# The notebooks below have a check of their own, so that they need no ranks.
OWN_CHECK = "def check(f):\n    print(f())\n"


def test_grading_goes_on_after_cells_that_fail_or_never_end(tmp_path):
    cells = [OWN_CHECK, "def a(): return '✓ value'", "check(a)", "raise RuntimeError('mine')"]
    cells += ["def b(): return '✗ cost    4 messages, budget 3'", "check(b)", "check(never_defined)"]
    cells += ["# check(no)\nimport time\ntime.sleep(60)", "def c(): return 'not written yet'\ncheck(c)"]
    mine = save(tmp_path / "00_mine.ipynb", *cells)
    (tmp_path / "lessons").mkdir()
    save(tmp_path / "lessons" / "00_lesson.ipynb", "check(a)", "check(removed)")
    before = mine.read_bytes()
    report = grading.grade(mine, cell_timeout=2, notebooks=tmp_path / "lessons")
    assert report.stopped is None and mine.read_bytes() == before
    verdicts = {exercise.name: exercise.status for exercise in report.exercises}
    assert verdicts == {"a": HOLDS, "b": FAILS, "never_defined": FAILS, "c": NOT_WRITTEN, "removed": MISSING}
    table = grading.as_text(report)
    assert "4 messages, budget 3" in table and "missing" in table and "1 of 5 exercises hold." in table


def test_a_kernel_that_dies_leaves_the_rest_not_reached(tmp_path, capsys):
    path = save(tmp_path / "mine.ipynb", OWN_CHECK, "check(lambda: '✓')", "import os\nos._exit(3)", "check(f)")
    notebook = nbformat.read(path, as_version=4)
    notebook.cells[3].outputs = [stream("✓ value\n")]  # what an earlier run saved does not count
    path.write_text(outputs.to_text(notebook))
    assert grading.main([str(path), "--json"]) == 1
    (report,) = json.loads(capsys.readouterr().out)
    assert "cell 3" in report["stopped"] and report["exercises"][-1]["status"] == NOT_REACHED


def test_several_notebooks_end_in_a_table_and_the_status_says_whether_all_hold(tmp_path, capsys):
    holds = save(tmp_path / "anna.ipynb", OWN_CHECK, "def f(): return '✓ value'\ncheck(f)")
    fails = save(tmp_path / "ben.ipynb", OWN_CHECK, "def f(): return '✗ value'\ncheck(f)")
    assert grading.main([str(holds)]) == 0
    assert grading.main([str(holds), str(fails)]) == 1
    *_, anna, ben = capsys.readouterr().out.splitlines()
    assert anna.split(maxsplit=1) == [str(holds), "1 of 1"]
    assert ben.split(maxsplit=1) == [str(fails), "0 of 1    f fails"]


@pytest.mark.parametrize("content", [None, "not json", '{"nbformat": 3}'])
def test_a_file_that_is_no_notebook_is_refused_before_anything_runs(tmp_path, content):
    path, good = tmp_path / "x.ipynb", save(tmp_path / "good.ipynb", "open('ran', 'w')")
    if content is not None:
        path.write_text(content)
    with pytest.raises(UsageError, match=str(path)):
        grading.main([str(good), str(path)])
    assert not (tmp_path / "ran").exists()
