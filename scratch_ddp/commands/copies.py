"""The learner's copies of the lessons: made where missing, and never overwritten.

A copy starts without outputs, so that a guess comes before its answer.
"""

import argparse
import time
from pathlib import Path

import nbformat
from ipykernel.ipkernel import IPythonKernel

from scratch_ddp.commands.notebooks import (
    COPIES,
    KERNEL_NAME,
    NOTEBOOKS,
    UsageError,
    complain,
    find_lesson,
    lesson_paths,
)
from scratch_ddp.commands.outputs import KERNELSPEC, clear_outputs, replace, to_text

INSTEAD_OF_SOLUTIONS = "solutions.md"  # scratch_ddp.course.check looks for it
WHERE_SOLUTIONS_ARE = "Your teacher has the solutions.\n"


def make_copies(notebooks: Path = NOTEBOOKS, copies: Path = COPIES) -> None:
    """Copy the lessons, their pages and the capstone's files, as far as they are missing."""
    for source in [*lesson_paths(notebooks), *_pages(notebooks)]:
        target = copies / _name_of_copy(source)
        if not target.exists():
            _copy(source, target)


def copy_fresh(source: Path, copies: Path = COPIES) -> Path | None:
    """Put a fresh copy of one lesson in place; an older one is kept under a dated name, which is returned."""
    target, kept = copies / _name_of_copy(source), None
    if target.exists():
        now, second = time.strftime("%Y-%m-%d-%H%M%S"), 1
        while (kept := target.with_stem(f"{target.stem}-{now}" + f"-{second}" * (second > 1))).exists():
            second += 1
        target.rename(kept)
    _copy(source, target)
    return kept


def _pages(notebooks: Path) -> list[Path]:
    """Glossary, symptoms, map: what the lessons link to; and the files of the capstone."""
    return sorted(notebooks.glob("*.md")) + sorted(notebooks.glob("capstone/*.py"))


def _name_of_copy(source: Path) -> str:
    """The file's name; for a file of the capstone with its folder."""
    return f"{source.parent.name}/{source.name}" if source.suffix == ".py" else source.name


def _copy(source: Path, target: Path) -> None:
    text = source.read_text(encoding="utf-8")
    if source.suffix == ".ipynb":
        notebook = nbformat.reads(text, as_version=4)
        clear_outputs(notebook)
        # As JupyterLab would set them, and mark the copy unsaved.
        notebook.metadata["language_info"] = IPythonKernel.language_info
        notebook.metadata["kernelspec"] = KERNELSPEC | {"display_name": KERNEL_NAME}
        text = to_text(notebook)
    target.parent.mkdir(parents=True, exist_ok=True)
    replace(target, text)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python3 -m scratch_ddp copy", description="Make a copy of a lesson.")
    parser.add_argument("lesson", metavar="LESSON", nargs="?", help="02, or 02_inside_all_reduce, my_ddp, glossary")
    parser.add_argument("--fresh", action="store_true", help="keep an existing copy under a dated name and start again")
    parser.add_argument("--for-students", type=Path, metavar="FOLDER", help="all lessons, in a new folder to hand out")
    options = parser.parse_args(arguments)
    if (options.lesson is None) == (options.for_students is None):
        parser.error("give a LESSON, or --for-students FOLDER")
    try:
        return _copy_one(options.lesson, options.fresh) if options.lesson else hand_out(options.for_students)
    except UsageError as error:
        return complain(error)


def _copy_one(lesson: str, fresh: bool) -> int:
    named = (page for page in _pages(NOTEBOOKS) if lesson in (page.stem, page.name))
    source = next(named, None) or find_lesson(lesson)
    target = COPIES / _name_of_copy(source)
    if target.exists() and not fresh:
        command = f"python3 -m scratch_ddp copy {source.stem} --fresh"
        print(f"{target} already exists and was not changed. To keep it and start again: {command}")
        return 1
    kept = copy_fresh(source, COPIES)
    if kept:
        print(f"Your work is now in {kept}.")
    print(f"A fresh copy is in {target}.")
    return 0


def hand_out(folder: Path, notebooks: Path = NOTEBOOKS) -> int:
    """Make a new folder with copies of all lessons and pages, and the file that `solution` prints there instead."""
    if folder.exists():
        raise UsageError(f"{folder} already exists: name a new folder.")
    make_copies(notebooks, folder)
    note = folder / INSTEAD_OF_SOLUTIONS
    replace(note, WHERE_SOLUTIONS_ARE)
    print(f"The lessons are in {folder}. Students put this folder into their clone as my_lessons/.")
    print(f"In it, solution(...) prints what {note} says: edit that file.")
    return 0
