"""The project's commands: the environment they run in, the learner's copies, the lab, the list of checks."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from scratch_ddp.__main__ import main
from scratch_ddp.commands import copies, environment, lab
from scratch_ddp.commands import test as checks
from scratch_ddp.commands.notebooks import NOTEBOOKS, ROOT, find_lesson
from scratch_ddp.course import solution
from scratch_ddp.course.exercise import all_exercises
from tests.notebooks.files import save


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
    assert calls == ["venv", "pip", "pip", "compileall"]  # it went on where it stopped, once
    environment.python_of(venv).unlink()
    environment.update(venv)
    venv = venv.rename(tmp_path / "moved")
    environment.update(venv)
    assert calls[4:] == ["venv", "pip", "compileall"] * 2


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


def test_kernels_come_from_this_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    monkeypatch.setenv("PATH", "/usr/bin")
    found = environment.variables(Path("/venv"))
    assert found["JUPYTER_PATH"] == f"/venv/share/jupyter:{tmp_path}" and found["PATH"] == "/venv/bin:/usr/bin"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("cook", "There is no command 'cook'"),
        ("copy 99", "There is no lesson '99'. The lessons: 00_ranks, 01_collectives, "),
        ("copy 02_ins", "There is no lesson '02_ins'"),
        ("copy --for-students /", "/ already exists"),
        *(
            (f"lab {ip}", f"refuses {re.escape(ip)}: .*ssh -L.*container")
            for ip in ("--ip=::", "--ip", "--ServerApp.ip=*")
        ),
    ],
)
def test_what_was_asked_for_wrongly_is_a_sentence(arguments, says, monkeypatch):
    monkeypatch.setattr(environment, "enter", lambda _: None)
    with pytest.raises(SystemExit, match=says):
        main(arguments.split())


def test_how_a_lesson_may_be_named():
    for name in ("2", "02", "02_inside_all_reduce", "notebooks/02_inside_all_reduce.ipynb"):
        assert find_lesson(name).stem == "02_inside_all_reduce"
    assert find_lesson("11b").stem == "11b_recomputation"


def test_copies_start_without_outputs_and_work_is_never_overwritten(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(copies, "COPIES", tmp_path)
    copies.make_copies(tmp_path)
    lesson, page, mine = (tmp_path / name for name in ("11b_recomputation.ipynb", "map.md", "capstone/my_ddp.py"))
    cells = nbformat.read(lesson, as_version=4).cells
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)
    page.unlink()
    mine.write_text("class MyDDP: ...\n")
    save(lesson, "first_try = 1")
    copies.make_copies(tmp_path)
    assert page.read_text() == (NOTEBOOKS / "map.md").read_text() and mine.read_text() == "class MyDDP: ...\n"
    assert "first_try" in lesson.read_text()
    assert copies.main(["my_ddp"]) == 0 and mine.read_text() == (NOTEBOOKS / "capstone" / "my_ddp.py").read_text()
    (kept,) = mine.parent.glob("my_ddp-20*.py")
    assert kept.read_text() == "class MyDDP: ...\n" and f"Your work is now in {kept}" in capsys.readouterr().out


def test_in_a_copy_for_students_solution_says_where_the_solutions_are(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "for_students"
    assert copies.main(["--for-students", str(folder)]) == 0
    assert (folder / "01_collectives.ipynb").exists() and (folder / "capstone" / "my_ddp.py").exists()
    monkeypatch.chdir(folder)
    capsys.readouterr()
    solution(all_exercises()["reduce"].reference)
    assert capsys.readouterr().out == copies.WHERE_SOLUTIONS_ARE


def test_the_lab_listens_on_this_machine_alone_and_keeps_what_it_writes_beside_the_copies(tmp_path):
    assert "--ServerApp.ip=127.0.0.1" in lab.lab_command(["--no-browser"])
    assert lab.variables(tmp_path)["JUPYTER_DATA_DIR"] == f"{tmp_path}/.jupyter/data"


def test_every_check_runs_and_one_that_fails_is_enough(monkeypatch, capsys):
    ran = []
    monkeypatch.setattr(checks.subprocess, "call", lambda command, **_: ran.append(command) or int("ruff" in command))
    assert checks.main([]) == 1 and len(ran) == len(checks.CHECKS)
    assert "✗ ruff check" in capsys.readouterr().out
    assert checks.main(["-k", "one"]) == 0 and ran[-1][-2:] == ["-k", "one"]
