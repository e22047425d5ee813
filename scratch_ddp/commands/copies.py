"""The learner's copies of the lessons: made where missing, renewed while untouched, never overwritten.

A copy starts without outputs, so that a guess comes before its answer. A list in the folder remembers how each file
looked when it was copied: a file that still looks so was not worked on.
"""

import argparse
import hashlib
import json
import time
from pathlib import Path

import nbformat
from ipykernel.ipkernel import IPythonKernel

from scratch_ddp.commands.lessons import COPIES, KERNEL_NAME, NOTEBOOKS, UsageError, complain, find_lesson, lesson_paths
from scratch_ddp.commands.outputs import KERNELSPEC, clear_outputs, replace, to_text

AS_COPIED = ".as_copied.json"
INSTEAD_OF_SOLUTIONS = "solutions.md"  # scratch_ddp.course.check looks for it
WHERE_SOLUTIONS_ARE = "Your teacher has the solutions.\n"


def make_copies(notebooks: Path = NOTEBOOKS, copies: Path = COPIES) -> list[str]:
    """Copy what is missing or has a newer version and was not worked on; returns what there is to say."""
    copies.mkdir(exist_ok=True)
    remembered = _read_list(copies)
    notes = []
    for source in [*lesson_paths(notebooks), *_pages(notebooks)]:
        name, text = _name_of_copy(source), _text_for_copy(source)
        target, as_copied, newest = copies / name, remembered.get(name), _digest(text.encode())
        present = _digest(target.read_bytes()) if target.exists() else None
        if present == newest:
            remembered[name] = newest
        elif present is None or present == as_copied:
            _write(target, text)
            remembered[name] = newest
        elif as_copied != newest:
            notes.append(f"{source.stem} has a newer version; yours stays. To take it: {_command(source)}")
    replace(copies / AS_COPIED, json.dumps(remembered, indent=1, sort_keys=True) + "\n")
    return notes


def copy_fresh(source: Path, copies: Path = COPIES, now: time.struct_time | None = None) -> Path | None:
    """Put a fresh copy of one lesson in place; what was worked on is kept under a dated name, which is returned."""
    copies.mkdir(exist_ok=True)
    remembered = _read_list(copies)
    name, text = _name_of_copy(source), _text_for_copy(source)
    target, kept = copies / name, None
    if target.exists() and _digest(target.read_bytes()) not in (remembered.get(name), _digest(text.encode())):
        kept = _unused(target.with_stem(f"{target.stem}-{time.strftime('%Y-%m-%d-%H%M%S', now or time.localtime())}"))
        target.rename(kept)
    _write(target, text)
    remembered[name] = _digest(text.encode())
    replace(copies / AS_COPIED, json.dumps(remembered, indent=1, sort_keys=True) + "\n")
    return kept


def copy_for_students(folder: Path, notebooks: Path = NOTEBOOKS) -> None:
    """Make a new folder with copies of all lessons and pages, and the file that `solution` prints there instead."""
    if folder.exists():
        raise UsageError(f"{folder} already exists: name a new folder.")
    folder.mkdir(parents=True)
    for source in [*lesson_paths(notebooks), *_pages(notebooks)]:
        _write(folder / _name_of_copy(source), _text_for_copy(source))
    replace(folder / INSTEAD_OF_SOLUTIONS, WHERE_SOLUTIONS_ARE)


def _pages(notebooks: Path) -> list[Path]:
    """Glossary, symptoms, map: what the lessons link to; and the files of the capstone."""
    return sorted(notebooks.glob("*.md")) + sorted(notebooks.glob("capstone/*.py"))


def _name_of_copy(source: Path) -> str:
    """The file's name; for a file of the capstone with its folder."""
    return f"{source.parent.name}/{source.name}" if source.suffix == ".py" else source.name


def _write(target: Path, text: str) -> None:
    target.parent.mkdir(exist_ok=True)
    replace(target, text)


def _text_for_copy(source: Path) -> str:
    if source.suffix != ".ipynb":
        return source.read_text(encoding="utf-8")
    notebook = nbformat.read(source, as_version=4)
    clear_outputs(notebook)
    # As JupyterLab would set them, and mark the copy unsaved.
    notebook.metadata["language_info"] = IPythonKernel.language_info
    notebook.metadata["kernelspec"] = KERNELSPEC | {"display_name": KERNEL_NAME}
    return to_text(notebook)


def _unused(path: Path) -> Path:
    candidate, number = path, 2
    while candidate.exists():
        candidate, number = path.with_stem(f"{path.stem}-{number}"), number + 1
    return candidate


def _read_list(copies: Path) -> dict[str, str]:
    try:
        return json.loads((copies / AS_COPIED).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _command(source: Path) -> str:
    return f"python3 -m scratch_ddp copy {source.stem} --fresh"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python3 -m scratch_ddp copy", description="Make a copy of a lesson.")
    parser.add_argument("lesson", metavar="LESSON", nargs="?", help="02, or 02_inside_all_reduce, my_ddp, glossary")
    parser.add_argument("--fresh", action="store_true", help="keep an existing copy under a dated name and start again")
    parser.add_argument("--for-students", type=Path, metavar="FOLDER", help="all lessons, in a new folder to hand out")
    options = parser.parse_args(arguments)
    if (options.lesson is None) == (options.for_students is None):
        parser.error("give a LESSON, or --for-students FOLDER")
    try:
        return _copy(options.lesson, options.fresh) if options.lesson else _hand_out(options.for_students)
    except UsageError as error:
        return complain(error)


def _copy(lesson: str, fresh: bool) -> int:
    named = [page for page in _pages(NOTEBOOKS) if lesson in (page.stem, page.name)]
    source = named[0] if named else find_lesson(lesson)
    target = COPIES / _name_of_copy(source)
    if target.exists() and not fresh:
        print(f"{_shown(target)} already exists and was not changed. To keep it and start again: {_command(source)}")
        return 1
    kept = copy_fresh(source, COPIES)
    if kept:
        print(f"Your work is now in {_shown(kept)}.")
    print(f"A fresh copy is in {_shown(target)}.")
    return 0


def _hand_out(folder: Path) -> int:
    copy_for_students(folder)
    note = folder / INSTEAD_OF_SOLUTIONS
    print(f"The lessons are in {folder}. Students put this folder into their clone as my_lessons/.")
    print(f"In it, solution(...) prints what {note} says: edit that file.")
    return 0


def _shown(path: Path) -> str:
    return f"{COPIES.name}/{path.relative_to(COPIES)}"
