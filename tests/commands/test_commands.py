"""The project's commands: the environment they run in, the learner's copies, the lab, the list of checks."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from scratch_ddp.__main__ import main
from scratch_ddp.commands import copies, environment, lab, notebooks, outputs
from scratch_ddp.commands import test as checks
from scratch_ddp.commands.notebooks import ROOT
from scratch_ddp.course import solution
from scratch_ddp.course.exercise import all_exercises
from tests.notebooks.files import save


@pytest.fixture
def course(tmp_path, monkeypatch):
    """A clone in small: two lessons with outputs, one of two parts, a page, a file of the capstone; no copies yet."""
    folder = tmp_path / "notebooks"
    (folder / "capstone").mkdir(parents=True)
    for stem in ("00_first", "00b_part", "01_second"):
        output = new_output("stream", text="the answer")
        cells = [new_markdown_cell(stem), new_code_cell("print('the answer')", outputs=[output], execution_count=1)]
        (folder / f"{stem}.ipynb").write_text(outputs.to_text(new_notebook(cells=cells)))
    (folder / "glossary.md").write_text("# Words\n")
    (folder / "capstone" / "my_ddp.py").write_text("# yours\n")
    monkeypatch.setattr(copies, "NOTEBOOKS", folder)
    monkeypatch.setattr(copies, "COPIES", tmp_path / "mine")
    return tmp_path


def test_a_set_up_that_fails_leaves_no_stamp_and_what_no_longer_runs_is_made_anew(tmp_path, monkeypatch):
    venv, calls, fails = tmp_path / ".venv", [], ["pip"]

    def call(command, **_):
        if command[1] == "-c":
            return 0
        calls.append(command[2])
        if command[2] == "venv":
            (venv / "bin").mkdir(parents=True, exist_ok=True)
            (venv / "pyvenv.cfg").touch()
            environment.python_of(venv).touch()
        return int(command[2] in fails)

    monkeypatch.setattr(environment.subprocess, "call", call)
    with pytest.raises(SystemExit, match="run the same command again"):
        environment.update(venv)
    fails.clear()
    for _ in range(2):
        environment.update(venv)
    assert calls == ["venv", "pip", "pip"]  # it went on where it stopped, once
    environment.python_of(venv).unlink()
    environment.update(venv)
    venv = venv.rename(tmp_path / "moved")
    environment.update(venv)
    assert calls[3:] == ["venv", "pip"] * 2


def test_what_setting_up_refuses(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(SystemExit, match="SCRATCH_DDP_VENV"):
        environment.create(tmp_path)
    assert (tmp_path / "thesis.txt").exists()
    with pytest.raises(SystemExit, match=r"needs Python 3\.11 or newer.* is Python 3\.9"):
        environment.check_python((3, 9, 18))
    environment.check_python((4, 0, 0))


def test_set_up_needs_the_standard_library_alone_and_an_old_python_can_read_it():
    loaded = "import sys, scratch_ddp.__main__; print(*(m.__file__ for n, m in sys.modules.items() if 'scratch' in n))"
    command = [sys.executable, "-S", "-c", loaded]  # -S: no site-packages at all
    paths = subprocess.check_output(command, cwd=ROOT, text=True).split()
    assert len(paths) >= 4
    for path in paths:
        ast.parse(Path(path).read_text(), feature_version=(3, 7))


def test_what_was_asked_for_wrongly_is_a_sentence(monkeypatch):
    monkeypatch.setattr(environment, "enter", lambda _: None)
    for arguments, says in ((["copy", "99"], "There is no lesson '99'"), (["cook"], "There is no command 'cook'")):
        with pytest.raises(SystemExit, match=says):
            main(arguments)


def test_kernels_come_from_this_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    monkeypatch.setenv("PATH", "/usr/bin")
    found = environment.variables(Path("/venv"))
    assert found["JUPYTER_PATH"] == f"/venv/share/jupyter:{tmp_path}" and found["PATH"] == "/venv/bin:/usr/bin"


def test_copies_start_without_outputs_and_work_is_never_overwritten(course, capsys):
    mine = course / "mine"
    copies.make_copies(course / "notebooks", mine)
    copy = nbformat.read(mine / "00_first.ipynb", as_version=4)
    assert copy.cells[1].outputs == [] and copy.cells[1].execution_count is None
    assert (mine / "glossary.md").read_text() == "# Words\n" and (mine / "00b_part.ipynb").exists()
    (mine / "glossary.md").unlink()
    (mine / "capstone" / "my_ddp.py").write_text("class MyDDP: ...\n")
    save(mine / "00_first.ipynb", "first_try = 1")
    copies.make_copies(course / "notebooks", mine)
    assert (mine / "glossary.md").exists() and "MyDDP" in (mine / "capstone" / "my_ddp.py").read_text()
    assert "first_try" in (mine / "00_first.ipynb").read_text()
    assert copies.main(["my_ddp"]) == 0 and "MyDDP" not in (mine / "capstone" / "my_ddp.py").read_text()
    assert "Your work is now in" in capsys.readouterr().out
    assert any("MyDDP" in path.read_text() for path in (mine / "capstone").glob("my_ddp-20*.py"))


def test_in_a_copy_for_students_solution_says_where_the_solutions_are(course, monkeypatch, capsys):
    folder = course / "for_students"
    copies.hand_out(folder, course / "notebooks")
    assert (folder / "01_second.ipynb").exists() and (folder / "capstone" / "my_ddp.py").exists()
    capsys.readouterr()
    solution(all_exercises()["reduce"].reference)
    assert "def reduce" in capsys.readouterr().out
    monkeypatch.chdir(folder)
    solution(all_exercises()["reduce"].reference)
    assert capsys.readouterr().out == copies.WHERE_SOLUTIONS_ARE
    with pytest.raises(SystemExit, match="already exists"):
        copies.main(["--for-students", str(folder)])


def test_how_a_lesson_may_be_named(course):
    folder = course / "notebooks"
    for name in ("1", "01", "01_second", "notebooks/01_second.ipynb"):
        assert notebooks.find_lesson(name, folder).stem == "01_second"
    assert notebooks.find_lesson("00b", folder).stem == "00b_part"
    for name in ("7", "second", "00_fir"):
        with pytest.raises(SystemExit, match="00_first, 00b_part, 01_second"):
            notebooks.find_lesson(name, folder)


def test_the_lab_says_that_it_refuses_ip_and_what_to_do_instead():
    for argument in ("--ip=0.0.0.0", "--ip", "--ServerApp.ip=*"):
        with pytest.raises(SystemExit, match=rf"lab refuses {re.escape(argument)}: .*the default.*ssh -L.*container"):
            lab.main([argument])


def test_the_lab_passes_arguments_on_and_keeps_what_it_writes_beside_the_copies(tmp_path):
    command = lab.lab_command(["--no-browser", "--port", "8890"], start_at="00_ranks.ipynb")
    assert command[:3] == [sys.executable, "-m", "jupyterlab"] and command[-3:] == ["--no-browser", "--port", "8890"]
    assert "--ServerApp.ip=127.0.0.1" in command and ("--allow-root" in command) == (os.geteuid() == 0)
    assert lab.variables(tmp_path)["JUPYTER_CONFIG_DIR"].rstrip("/") == f"{tmp_path}/.jupyter"


def test_every_check_runs_and_one_that_fails_is_enough(monkeypatch, capsys):
    ran = []
    monkeypatch.setattr(checks.subprocess, "call", lambda command, **_: ran.append(command) or int("ruff" in command))
    assert checks.main([]) == 1 and len(ran) == len(checks.CHECKS)
    assert "✗ ruff check" in capsys.readouterr().out
    assert checks.main(["-k", "one"]) == 0 and ran[-1][-2:] == ["-k", "one"]
