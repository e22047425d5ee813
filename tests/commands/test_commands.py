"""The project's commands: the environment they run in, the learner's copies, the lab, the list of checks."""

import ast
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from scratch_ddp.__main__ import COMMANDS
from scratch_ddp.__main__ import main as run_command
from scratch_ddp.commands import copies, environment, lab, lessons, outputs
from scratch_ddp.commands import grade as grading
from scratch_ddp.commands import test as checks
from scratch_ddp.commands.environment import CREATE, INSTALL, READY, SetupFailed
from scratch_ddp.commands.lessons import UsageError
from scratch_ddp.course import solution
from scratch_ddp.course.exercise import all_exercises
from tests.notebooks.files import save


@pytest.fixture
def course(tmp_path):
    """A clone in small: two lessons with outputs, a page, and no copies yet."""
    folder = tmp_path / "notebooks"
    folder.mkdir()
    for stem in ("00_first", "01_second"):
        output = new_output("stream", text="the answer")
        cells = [new_markdown_cell(stem), new_code_cell("print('the answer')", outputs=[output], execution_count=1)]
        (folder / f"{stem}.ipynb").write_text(outputs.to_text(new_notebook(cells=cells)))
    (folder / "glossary.md").write_text("# Words\n")
    return tmp_path


# ── the environment


def stamp(**changes) -> dict:
    return {"requirements": "abc", "clone": "/c", "folder": "/c/.venv", "python": [3, 11], **changes}


@pytest.mark.parametrize(
    ("left_by_last_time", "wanted", "has_pip", "expected"),
    [
        (stamp(), stamp(), True, READY),
        (stamp(), stamp(requirements="new"), True, INSTALL),
        (stamp(), stamp(clone="/elsewhere"), True, INSTALL),
        (stamp(), stamp(folder="/moved/.venv"), True, CREATE),
        (stamp(), stamp(python=[3, 13]), True, CREATE),
        (stamp(), stamp(python=None), True, CREATE),
        (stamp(python=[3, 9]), stamp(python=[3, 9]), True, CREATE),
        (None, stamp(), True, INSTALL),
        (None, stamp(), False, CREATE),
        (None, stamp(python=None), False, CREATE),
    ],
)
def test_what_an_environment_needs(left_by_last_time, wanted, has_pip, expected):
    assert environment.what_to_do(left_by_last_time, wanted, has_pip=lambda: has_pip) == expected


def test_a_set_up_that_fails_leaves_no_stamp_and_is_done_again(tmp_path, monkeypatch):
    venv, calls, status = tmp_path / ".venv", [], [0, 1, 0, 0]

    def call(command, **_):
        calls.append(command[2])
        if command[2] == "venv":
            (venv / "bin").mkdir(parents=True, exist_ok=True)
            (venv / "pyvenv.cfg").touch()
            environment.python_of(venv).unlink(missing_ok=True)
            environment.python_of(venv).symlink_to(sys.executable)
        return status.pop(0)

    monkeypatch.setattr(environment.subprocess, "call", call)
    with pytest.raises(SetupFailed, match="run the same command again"):
        environment.update(venv)
    assert environment.read_stamp(venv) is None
    monkeypatch.setattr(environment, "_works", lambda *command: True)
    environment.update(venv)
    environment.update(venv)
    assert calls == ["venv", "pip", "pip"]


def test_a_folder_with_something_else_in_it_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(SetupFailed, match="SCRATCH_DDP_VENV"):
        environment.create(tmp_path)
    assert (tmp_path / "thesis.txt").exists()


def test_an_old_python_is_refused_in_one_sentence():
    with pytest.raises(SetupFailed, match=r"needs Python 3\.11 or newer.* is Python 3\.9"):
        environment.check_python((3, 9, 18))
    environment.check_python((3, 11, 0))
    environment.check_python((4, 0, 0))


def test_set_up_needs_nothing_but_the_standard_library():
    loaded = "import sys, scratch_ddp.__main__; print([m for m in ('torch', 'numpy', 'nbformat') if m in sys.modules])"
    command = [sys.executable, "-S", "-c", loaded]  # -S: no site-packages at all
    assert subprocess.check_output(command, cwd=environment.ROOT, text=True).strip() == "[]"


def test_kernels_come_from_this_environment(tmp_path, monkeypatch):
    decoy = tmp_path / "kernels" / "python3"
    decoy.mkdir(parents=True)
    (decoy / "kernel.json").write_text(json.dumps({"argv": ["false"], "display_name": "decoy", "language": "python"}))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    search = (
        "from jupyter_client.kernelspec import KernelSpecManager as M; print(M().get_kernel_spec('python3').argv[0])"
    )
    kernels = {**os.environ, **environment.variables(Path(sys.prefix))}
    assert subprocess.check_output([sys.executable, "-c", search], text=True).strip() == "false"
    assert subprocess.check_output([sys.executable, "-c", search], text=True, env=kernels).strip() != "false"


def test_an_unknown_command_is_named(capsys):
    assert run_command(["labb"]) == 2
    assert "no command 'labb'" in capsys.readouterr().err
    assert run_command(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in COMMANDS)


# ── copies


def test_copies_start_without_outputs_and_bring_the_pages(course):
    assert copies.make_copies(course / "notebooks", course / "mine") == []
    copy = nbformat.read(course / "mine" / "00_first.ipynb", as_version=4)
    assert copy.cells[1].outputs == [] and copy.cells[1].execution_count is None
    assert (course / "mine" / "glossary.md").read_text() == "# Words\n"
    assert "the answer" in (course / "notebooks" / "00_first.ipynb").read_text()


def test_work_is_never_overwritten_and_untouched_copies_follow_the_lessons(course):
    notebooks, mine = course / "notebooks", course / "mine"
    copies.make_copies(notebooks, mine)
    save(mine / "00_first.ipynb", "my_work = 1")
    for stem in ("00_first", "01_second"):
        save(notebooks / f"{stem}.ipynb", "a_newer_version = 1")
    notes = copies.make_copies(notebooks, mine)
    assert "my_work" in (mine / "00_first.ipynb").read_text()
    assert "a_newer_version" in (mine / "01_second.ipynb").read_text()
    assert len(notes) == 1 and "copy 00_first --fresh" in notes[0]


def test_a_lost_list_of_copies_loses_no_work(course):
    notebooks, mine = course / "notebooks", course / "mine"
    copies.make_copies(notebooks, mine)
    save(mine / "00_first.ipynb", "my_work = 1")
    (mine / copies.AS_COPIED).write_text("{ broken")
    copies.make_copies(notebooks, mine)
    assert "my_work" in (mine / "00_first.ipynb").read_text()


def test_a_fresh_copy_keeps_every_older_one(course):
    notebooks, mine = course / "notebooks", course / "mine"
    source, now = notebooks / "00_first.ipynb", time.struct_time((2026, 1, 31, 9, 5, 0, 5, 31, 0))
    assert copies.copy_fresh(source, mine, now) is None
    kept = []
    for attempt in ("first_try", "second_try"):  # both within one second
        save(mine / source.name, f"{attempt} = 1")
        kept.append(copies.copy_fresh(source, mine, now))
    assert [path.name for path in kept] == ["00_first-2026-01-31-090500.ipynb", "00_first-2026-01-31-090500-2.ipynb"]
    assert "first_try" in kept[0].read_text() and "second_try" in kept[1].read_text()
    assert copies.copy_fresh(source, mine, now) is None  # nothing was done in this one
    assert grading.original_of(kept[1], notebooks) == source


def test_in_a_copy_for_students_solution_says_where_the_solutions_are(course, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "for_students"
    copies.copy_for_students(folder, course / "notebooks")
    assert {path.name for path in folder.iterdir()} == {
        "00_first.ipynb",
        "01_second.ipynb",
        "glossary.md",
        copies.INSTEAD_OF_SOLUTIONS,
    }
    assert "the answer" not in str(nbformat.read(folder / "00_first.ipynb", as_version=4).cells[1].outputs)
    solution(all_exercises()["reduce"].reference)
    assert "def reduce" in capsys.readouterr().out
    monkeypatch.chdir(folder)
    solution(all_exercises()["reduce"].reference)
    assert capsys.readouterr().out == copies.WHERE_SOLUTIONS_ARE
    with pytest.raises(UsageError, match="already exists"):
        copies.copy_for_students(folder, course / "notebooks")
    assert copies.make_copies(course / "notebooks", folder) == []  # it serves as the student's own copies


def test_the_files_of_the_capstone_are_copied_into_a_folder_of_their_own_without_solutions(course, capsys, monkeypatch):
    notebooks, mine = course / "notebooks", course / "mine"
    (notebooks / "capstone").mkdir()
    (notebooks / "capstone" / "my_ddp.py").write_text("# yours\n")
    copies.make_copies(notebooks, mine)
    answer = mine / "capstone" / "my_ddp.py"
    assert answer.read_text() == "# yours\n"
    answer.write_text("class MyDDP: ...\n")
    assert copies.make_copies(notebooks, mine) == [] and "MyDDP" in answer.read_text()
    monkeypatch.setattr(copies, "NOTEBOOKS", notebooks)
    monkeypatch.setattr(copies, "COPIES", mine)
    assert copies.main(["my_ddp", "--fresh"]) == 0 and "MyDDP" not in answer.read_text()
    assert "Your work is now in mine/capstone/my_ddp-" in capsys.readouterr().out
    copies.copy_for_students(course / "handout", lessons.NOTEBOOKS)
    files = {path.name for path in (course / "handout" / "capstone").iterdir()}
    assert files == {"my_ddp.py", "misbehaving.py"}


@pytest.mark.parametrize("arguments", [[], ["02", "--for-students", "x"]])
def test_copy_needs_a_lesson_or_a_folder_for_students(arguments, capsys):
    with pytest.raises(SystemExit):
        copies.main(arguments)
    assert "--for-students FOLDER" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["1", "01", "01_second", "01_second.ipynb", "notebooks/01_second.ipynb"])
def test_how_a_lesson_may_be_named(course, name):
    assert lessons.find_lesson(name, course / "notebooks").stem == "01_second"


def test_a_lesson_may_have_a_second_part(course):
    notebooks = course / "notebooks"
    (notebooks / "00b_second_part.ipynb").write_text((notebooks / "00_first.ipynb").read_text())
    assert [path.stem for path in lessons.lesson_paths(notebooks)] == ["00_first", "00b_second_part", "01_second"]
    assert [lessons.find_lesson(name, notebooks).stem for name in ("0", "0b", "00b")] == [
        "00_first",
        "00b_second_part",
        "00b_second_part",
    ]
    copies.make_copies(notebooks, course / "mine")
    assert (course / "mine" / "00b_second_part.ipynb").exists()


@pytest.mark.parametrize("name", ["7", "second", "", "00_fir"])
def test_a_lesson_that_is_not_there(course, name):
    with pytest.raises(UsageError, match="00_first, 01_second"):
        lessons.find_lesson(name, course / "notebooks")


# ── lab and test


@pytest.mark.parametrize("argument", ["--ip=0.0.0.0", "--ip", "--ServerApp.ip=*", "--ServerApp.ip"])
def test_the_lab_does_not_listen_to_other_machines(argument):
    with pytest.raises(UsageError, match="ssh -L"):
        lab.lab_command([argument])


def test_the_lab_passes_arguments_on():
    command = lab.lab_command(["--no-browser", "--port", "8890"], start_at="00_ranks.ipynb")
    assert command[:3] == [sys.executable, "-m", "jupyterlab"] and command[-3:] == ["--no-browser", "--port", "8890"]
    assert "--ServerApp.ip=127.0.0.1" in command and ("--allow-root" in command) == (os.geteuid() == 0)


def test_the_lab_keeps_its_settings_with_the_copies(tmp_path, monkeypatch):
    environ = {name: value for name, value in os.environ.items() if not name.startswith("JUPYTER_CONFIG")}
    monkeypatch.setattr(os, "environ", environ)
    monkeypatch.setattr(lab, "make_copies", list)
    monkeypatch.setattr(lab, "write_settings", list)
    monkeypatch.setattr(lab, "show_notebooks_as_text", lambda _: None)
    monkeypatch.setattr(lab.os, "execv", lambda *_: None)
    monkeypatch.setattr(lab, "COPIES", tmp_path)
    assert lab.main([]) is None
    paths = subprocess.check_output([sys.executable, "-m", "jupyterlab", "path"], text=True, env=environ)
    assert f"{tmp_path}/.jupyter/lab/user-settings" in paths


def test_git_shows_notebooks_as_text(course, monkeypatch):
    def git(*arguments: str) -> str:
        return subprocess.check_output(["git", "-C", str(course), *arguments], text=True)

    monkeypatch.setenv("PYTHONPATH", str(lessons.ROOT))
    git("init", "--quiet")
    (course / ".gitattributes").write_text((lessons.ROOT / ".gitattributes").read_text())
    git("add", ".")
    lab.show_notebooks_as_text(course)
    path = course / "notebooks" / "00_first.ipynb"
    notebook = nbformat.read(path, as_version=4)
    notebook.cells[1].source = "print('another answer')"
    notebook.cells[1].outputs[0].text = "another answer\n"
    notebook.cells[1].outputs.append(new_output("display_data", data={"image/png": "aGk=", "text/plain": "<Figure>"}))
    path.write_text(outputs.to_text(notebook))
    changed = [line for line in git("diff").splitlines()[4:] if line[0] in "+-"]
    assert changed == [
        "-print('the answer')",
        "-→ the answer",
        "+print('another answer')",
        "+→ another answer",
        "+→ <Figure>",
    ]
    path.write_text("<<<<<<< ours\n")
    assert "+<<<<<<< ours" in git("diff")


def test_every_check_runs_and_one_that_fails_is_enough(monkeypatch, capsys):
    ran = []

    def call(command, **_):
        ran.append(command)
        return 1 if "ruff" in command else 0

    monkeypatch.setattr(checks.subprocess, "call", call)
    assert checks.main([]) == 1
    assert len(ran) == len(checks.ALL)
    assert "✗ ruff check" in capsys.readouterr().out
    assert checks.main(["-k", "one"]) == 0 and ran[-1][-2:] == ["-k", "one"]
    ran.clear()
    assert checks.main(["--quick"]) == 1 and len(ran) == len(checks.QUICK)


def test_what_the_checks_name_is_there():
    arguments = {each for command in (checks.ALL | checks.QUICK).values() for each in command}
    named = [each for each in arguments if each.startswith(("tests/", "notebooks/"))]
    assert len(named) >= 12 and all((lessons.ROOT / each).exists() for each in named)


def test_an_old_python_can_read_what_comes_before_the_sentence_that_refuses_it():
    loaded = "import sys, scratch_ddp.__main__; print(*(m.__file__ for n, m in sys.modules.items() if 'scratch' in n))"
    paths = subprocess.check_output([sys.executable, "-c", loaded], cwd=environment.ROOT, text=True).split()
    assert len(paths) >= 4
    for path in paths:
        ast.parse(Path(path).read_text(), feature_version=(3, 7))


def test_what_the_lab_writes_is_beside_the_copies(tmp_path):
    folders = {name: value for name, value in lab.variables(tmp_path).items() if not name.startswith("SCRATCH_DDP")}
    assert {"JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR"} == set(folders)
    assert all(Path(folder).is_relative_to(tmp_path) for folder in folders.values())
