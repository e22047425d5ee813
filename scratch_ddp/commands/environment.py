"""The virtual environment that every command runs in: made on first use, kept in step with requirements.txt.

Only the standard library, and only syntax that Python 3.7 can read: an old one must get as far as the sentence that
says what is needed. A stamp in the environment tells what was installed, and for which folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

OLDEST = (3, 11)
ROOT = Path(__file__).resolve().parent.parent.parent  # the clone
REQUIREMENTS = ROOT / "requirements.txt"
STAMP = "scratch_ddp.json"
USABLE = f"import pip, sys; sys.exit(sys.version_info < {OLDEST})"


def folder() -> Path:
    """The environment's folder: `.venv` in the clone, or what SCRATCH_DDP_VENV says."""
    return Path(os.environ.get("SCRATCH_DDP_VENV") or ROOT / ".venv").absolute()


def enter(arguments: list[str]) -> None:
    """Go on inside the environment, which is made or updated first if need be.

    Outside of it this replaces the process by `python -m scratch_ddp <arguments>` of the environment and does not
    return. Inside, it only sets the variables that a kernel and its `!commands` should see.
    """
    check_python(sys.version_info)
    if not REQUIREMENTS.exists():
        raise SystemExit(f"These commands work in a clone of the repository; {ROOT} has no requirements.txt.")
    venv = folder()
    update(venv)
    if Path(sys.prefix).resolve() == venv.resolve():
        os.environ.update(variables(venv))
        return
    python = str(python_of(venv))
    os.execv(python, [python, "-m", "scratch_ddp"] + list(arguments))


def check_python(version: tuple[int, ...]) -> None:
    """Refuse a Python that is too old, in one sentence."""
    if tuple(version[:2]) < OLDEST:
        raise SystemExit(
            "This needs Python {}.{} or newer, and {} is Python {}.{}: run the same command with a newer one, "
            "for example python3.12.".format(*OLDEST, sys.executable, *version[:2])
        )


def python_of(venv: Path) -> Path:
    return venv / "bin" / "python"


def variables(venv: Path) -> dict[str, str]:
    """What activating the environment would set, and Jupyter's search path with this environment's kernel first."""
    first = {"PATH": str(venv / "bin"), "JUPYTER_PATH": str(venv / "share" / "jupyter")}
    paths = {name: os.pathsep.join(filter(None, [path, os.environ.get(name)])) for name, path in first.items()}
    return {"VIRTUAL_ENV": str(venv), **paths}


def update(venv: Path, requirements: Path = REQUIREMENTS) -> None:
    """Bring the environment up to date with the requirements; does nothing if it already is.

    It is made anew where its Python does not run (its base was removed, say), is too old or lacks pip, and where the
    folder was moved, since its scripts name it. One without a stamp was cut short, or made by hand: it may do.
    """
    digest = hashlib.sha256(requirements.read_bytes()).hexdigest()
    wanted = {"requirements": digest, "clone": str(ROOT), "folder": str(venv)}
    try:
        stamp = json.loads((venv / STAMP).read_text())
    except (OSError, ValueError):
        stamp = {}
    python = str(python_of(venv))
    usable = Path(python).exists() and stamp.get("folder", str(venv)) == str(venv)
    usable = usable and subprocess.call([python, "-c", USABLE], stderr=subprocess.DEVNULL) == 0
    if usable and stamp == wanted:
        return
    if not usable:
        print(f"Making a virtual environment in {venv} …", flush=True)
        create(venv)
    print(f"Installing {requirements.relative_to(ROOT)} (the first time this takes some minutes) …", flush=True)
    command = [python, "-m", "pip", "install", "--disable-pip-version-check", "--no-compile", "-r", str(requirements)]
    if subprocess.call(command, cwd=str(ROOT)) != 0:  # in ROOT, for the line `-e .`
        raise SystemExit(
            f"pip could not install {requirements.name} (the reason is above). Check the network, and "
            "that 3 GB are free. Then run the same command again: it continues where it stopped."
        )
    # pip would compile on one core only. A file that can't be compiled is no failure: some packages ship such ones.
    subprocess.call([python, "-m", "compileall", "-qq", "-j", "0", str(venv / "lib")])
    (venv / STAMP).write_text(json.dumps(wanted))


def create(venv: Path) -> None:
    """Make the environment anew; an old environment in that folder goes, anything else there is left alone."""
    if venv.exists() and any(venv.iterdir()) and not (venv / "pyvenv.cfg").exists():
        raise SystemExit(f"{venv} is a folder with something else in it: name another one in SCRATCH_DDP_VENV.")
    if subprocess.call([sys.executable, "-m", "venv", "--clear", str(venv)]) != 0:
        raise SystemExit("No virtual environment could be made: what is missing stands above. Then run this again.")
