"""`grade`: which exercises of a learner's notebook hold, whatever else is wrong with it."""

import json

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from scratch_ddp.commands import grade as grading
from scratch_ddp.commands import outputs
from scratch_ddp.commands.grade import FAILS, HOLDS, MISSING, NOT_REACHED, NOT_WRITTEN
from tests.notebooks.files import save, stream


def check_cell(source: str, *said, **more):
    cell = new_code_cell(source, outputs=[stream(text) for text in said])
    cell.execution_count = 1
    cell.outputs += more.get("outputs", [])
    return cell


@pytest.mark.parametrize(
    ("cell", "status", "lines"),
    [
        (check_cell("check(f)", "✓ value   ✓ agreement\n"), HOLDS, ["✓ value   ✓ agreement"]),
        (check_cell("check(f)", "✓ value\n✗ cost    4 messages\n"), FAILS, ["✓ value", "✗ cost    4 messages"]),
        (check_cell("check(f)", "✓ value   ← ranks 0–3\n"), HOLDS, ["✓ value"]),
        (
            check_cell("check(f)", "✓ value\n✗ runs    never came back\n↑ ranks 0–3\n"),
            FAILS,
            ["✓ value", "✗ runs    never came back"],
        ),
        (check_cell("check(f)", "· Rank 0 printed:\n·   ✓ all is well\n✗ value   wrong\n"), FAILS, ["✗ value   wrong"]),
        (check_cell("check(f)", "not written yet   ← ranks 0–3\n"), NOT_WRITTEN, []),
        (check_cell("check(f)"), FAILS, ["the check said nothing"]),
        (new_code_cell("check(f)"), NOT_REACHED, []),
        (
            check_cell("check(f)", outputs=[new_output("error", ename="NameError", evalue="f", traceback=[])]),
            FAILS,
            ["NameError: f"],
        ),
        (
            check_cell("check(f)", outputs=[new_output("display_data", data={"text/plain": "✓ value"})]),
            HOLDS,
            ["✓ value"],
        ),
    ],
)
def test_what_a_check_says_becomes_a_verdict(cell, status, lines):
    assert grading.verdict(cell) == (status, lines)


def test_only_a_call_of_check_is_an_exercise():
    cells = [new_code_cell("# check(f)"), new_code_cell("recheck(f)"), new_markdown_cell("check(f)")]
    cells += [new_code_cell("def f():\n    pass\n\ncheck(f)"), new_code_cell("check( g , 4)")]
    assert [found.name for found in grading.exercises_of(new_notebook(cells=cells))] == ["f", "g"]


# The notebooks below have a check of their own, so that they need no ranks.
OWN_CHECK = "def check(f):\n    print(f())\n"


@pytest.fixture
def learners_notebook(tmp_path):
    cells = [OWN_CHECK, "def a(): return '✓ value'", "check(a)", "raise RuntimeError('mine')"]
    cells += ["def b(): return '✗ cost    4 messages, budget 3'", "check(b)", "check(never_defined)"]
    cells += ["import time\ntime.sleep(60)", "def c(): return 'not written yet'\ncheck(c)"]
    return save(tmp_path / "00_mine.ipynb", *cells)


def test_grading_goes_on_after_cells_that_fail_or_never_end(learners_notebook, tmp_path):
    lesson = save(tmp_path / "lesson.ipynb", "check(a)", "check(removed)")
    before = learners_notebook.read_bytes()
    report = grading.grade(learners_notebook, cell_timeout=2, lesson=lesson)
    assert report.stopped is None and learners_notebook.read_bytes() == before
    verdicts = {exercise.name: exercise.status for exercise in report.exercises}
    assert verdicts == {"a": HOLDS, "b": FAILS, "never_defined": FAILS, "c": NOT_WRITTEN, "removed": MISSING}
    table = grading.as_text(report)
    assert "✗" in table and "4 messages, budget 3" in table and "not written" in table and "missing" in table
    assert "1 of 5 exercises hold." in table


def test_a_kernel_that_dies_leaves_the_rest_not_reached(tmp_path, capsys):
    path = save(tmp_path / "mine.ipynb", OWN_CHECK, "check(lambda: '✓')", "import os\nos._exit(3)", "check(f)")
    cells = nbformat.read(path, as_version=4)
    cells.cells[3].outputs = [stream("✓ value\n")]  # what an earlier run saved does not count
    path.write_text(outputs.to_text(cells))
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
def test_a_file_that_is_no_notebook_is_refused_before_anything_runs(tmp_path, content, capsys):
    path, good = tmp_path / "x.ipynb", save(tmp_path / "good.ipynb", "open('ran', 'w')")
    if content is not None:
        path.write_text(content)
    assert grading.main([str(good), str(path)]) == 2
    assert str(path) in capsys.readouterr().err and not (tmp_path / "ran").exists()


def test_the_help_says_that_what_is_graded_runs(capsys):
    with pytest.raises(SystemExit):
        grading.main(["--help"])
    assert "trusted code only" in " ".join(capsys.readouterr().out.split())
