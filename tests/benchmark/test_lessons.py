"""The lessons' own row, and the command without a name, which runs them all."""

import sys

import nbformat
import pytest

from scratch_ddp.benchmark import __main__ as command
from scratch_ddp.benchmark import lessons
from scratch_ddp.benchmark.lessons import chapters, run_repeatedly


def notebook(folder, name, saved):
    """One cell that prints 1, saved with an output that may be another."""
    output = nbformat.v4.new_output("stream", name="stdout", text=saved)
    cell = nbformat.v4.new_code_cell("print(1)", outputs=[output], execution_count=1)
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), folder / name)


def test_passes_are_counted_and_a_wrong_output_is_none(tmp_path):
    notebook(tmp_path, "10_right.ipynb", "1\n")
    right = run_repeatedly("10-11", runs=2, busy=True, folder=tmp_path)
    assert right.holds and right.measured.startswith("2 of 2, ") and "cores busy" in right.what
    notebook(tmp_path, "11_wrong.ipynb", "2\n")
    wrong = run_repeatedly("10-11", runs=1, busy=False, folder=tmp_path)
    assert not wrong.holds and wrong.measured.startswith("0 of 1, ") and "busy" not in wrong.what


def test_too_slow_is_not_right(tmp_path, monkeypatch):
    notebook(tmp_path, "10_right.ipynb", "1\n")
    monkeypatch.setitem(lessons.LIMITS, "10-11", 0.1)
    assert not run_repeatedly("10-11", runs=1, busy=False, folder=tmp_path).holds


def test_which_lessons(tmp_path):
    for name in ("06_a.ipynb", "07_b.ipynb", "09_c.ipynb", "09b_e.ipynb", "10_d.ipynb", "map.md"):
        (tmp_path / name).touch()
    assert [path.name for path in chapters("07-09", tmp_path)] == ["07_b.ipynb", "09_c.ipynb", "09b_e.ipynb"]


@pytest.mark.parametrize("asked, complaint", [(["12-13"], "'12-13' is none of 00-02"), ([], "in the clone's folder")])
def test_refusals(asked, complaint, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["benchmark", "lessons", *asked])
    assert command.main() == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize("failed", [1, -9])
def test_without_a_name_all_are_run_and_one_that_fails_is_not_forgotten(monkeypatch, capsys, failed):
    ran = []

    def call(command_line):
        ran.append(command_line[1:])
        return failed if command_line[-1] == "ddp" else 0

    monkeypatch.setattr(command.subprocess, "call", call)
    monkeypatch.setattr(sys, "argv", ["benchmark"])
    assert command.main() == 1
    assert ran == [["-m", "scratch_ddp.benchmark", name] for name in command.COMMANDS] and ran
    assert "## zero" in capsys.readouterr().out
