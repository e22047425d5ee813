"""The learner's copies of the lessons: made where missing, and never overwritten.

A copy starts without outputs, so that a guess comes before its answer. `copy LESSON` makes a fresh one, and keeps the
one that is there under a dated name.
"""

import argparse
import time
from pathlib import Path

import nbformat
from ipykernel.ipkernel import IPythonKernel
from jupyter_client.kernelspec import get_kernel_spec

from scratch_ddp.commands.notebooks import COPIES, NOTEBOOKS, find_lesson, lesson_paths
from scratch_ddp.commands.outputs import KERNELSPEC, clear_outputs, to_text

WHERE_SOLUTIONS_ARE = "Your teacher has the solutions.\n"


def sources() -> list[Path]:
    """The lessons, the pages that they link to, and the files of the capstone."""
    return [*lesson_paths(), *sorted(NOTEBOOKS.glob("*.md")), *sorted(NOTEBOOKS.glob("capstone/*.py"))]


def make_copies(folder: Path = COPIES) -> None:
    """Copy all that is missing in the folder."""
    for source in sources():
        target = folder / source.relative_to(NOTEBOOKS)
        if not target.exists():
            copy(source, target)


def copy(source: Path, target: Path) -> None:
    """Write a copy, of a notebook without outputs."""
    text = source.read_text(encoding="utf-8")
    if source.suffix == ".ipynb":
        notebook = nbformat.reads(text, as_version=4)
        clear_outputs(notebook)
        # As JupyterLab would set them: it would mark the copy unsaved.
        notebook.metadata["language_info"] = IPythonKernel.language_info
        notebook.metadata["kernelspec"] = KERNELSPEC | {"display_name": get_kernel_spec("python3").display_name}
        text = to_text(notebook)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial")  # whole or not at all
    partial.write_text(text, encoding="utf-8")
    partial.rename(target)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python3 -m scratch_ddp copy", description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("lesson", metavar="LESSON", nargs="?", help="02, or 02_inside_all_reduce, my_ddp, glossary")
    what.add_argument("--for-students", type=Path, metavar="FOLDER", help="all lessons, in a new folder to hand out")
    options = parser.parse_args(arguments)
    if options.for_students:
        hand_out(options.for_students)
        return 0
    named = (source for source in sources() if options.lesson in (source.stem, source.name))
    source = next(named, None) or find_lesson(options.lesson)
    target = COPIES / source.relative_to(NOTEBOOKS)
    if target.exists():
        kept = target.rename(target.with_stem(f"{target.stem}-{time.strftime('%Y-%m-%d-%H%M%S')}"))
        print(f"Your work is now in {kept}.")
    copy(source, target)
    print(f"A fresh copy is in {target}.")
    return 0


def hand_out(folder: Path) -> None:
    """Make a new folder with copies of everything, and the file that `solution` prints there instead."""
    if folder.exists():
        raise SystemExit(f"{folder} already exists: name a new folder.")
    make_copies(folder)
    note = folder / "solutions.md"  # scratch_ddp.course.check looks for it
    note.write_text(WHERE_SOLUTIONS_ARE)
    print(f"The lessons are in {folder}. Students put this folder into their clone as my_lessons/.")
    print(f"In it, solution(...) prints what {note} says: edit that file.")
