"""The lessons, run repeatedly: do their saved outputs hold, and how long does a run take?"""

import argparse
import contextlib
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from scratch_ddp.benchmark.command import TableRow, median_and_range, positive_count, report
from scratch_ddp.benchmark.rank_cells.processes import busy_cores
from scratch_ddp.commands.notebooks import lesson_paths
from scratch_ddp.instruments.timing import machine

# Seconds that a run of these lessons may take.
LIMITS = {"00-02": 180, "03-06": 240, "07-09": 240, "10-11": 180, "12": 90, "13-14": 180, "15": 90, "16": 180}
FOLDER = Path("notebooks")


def chapters(which: str, folder: Path = FOLDER) -> list[Path]:
    """The notebooks of "07-09", or of "12" alone. Raises ValueError if there are none here."""
    first, _, last = which.partition("-")
    found = [path for path in lesson_paths(folder) if first <= path.name[:2] <= (last or first)]
    if not found:
        raise ValueError(f"there are no lessons {which} in {folder.absolute().name}/: run it in the clone's folder")
    return found


def run_repeatedly(which: str, runs: int, busy: bool, folder: Path = FOLDER) -> TableRow:
    """Strict nbval of some lessons, `runs` times; with `busy`, every second run with all cores busy."""
    command = [sys.executable, "-m", "pytest", "-q", "--nbval", *map(str, chapters(which, folder))]
    took, passed = [], 0
    for run in range(runs):
        with busy_cores() if busy and run % 2 else contextlib.nullcontext():
            began = time.monotonic()
            ended = subprocess.run(command, stdout=subprocess.DEVNULL)
            took.append(time.monotonic() - began)
        passed += ended.returncode == 0
        print(f"{which}: {passed} of {run + 1}, {took[-1]:.0f} s", file=sys.stderr, flush=True)
    what = f"strict nbval of lessons {which}" + (", half of the runs with all cores busy" if busy else "")
    holds = passed == runs and max(took) < LIMITS[which]
    return TableRow(what, f"all, < {LIMITS[which]} s", f"{passed} of {runs}, {median_and_range(took)}", holds)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("which", nargs="*", metavar="LESSONS", help=f"any of {', '.join(LIMITS)}; default: all")
    parser.add_argument("--runs", type=positive_count, default=2, help="runs of each group of lessons (default: 2)")
    parser.add_argument("--busy", action="store_true", help="keep all cores busy in every second run")


def main(options: argparse.Namespace) -> int:
    which: Sequence[str] = options.which or list(LIMITS)
    try:
        if unknown := [each for each in which if each not in LIMITS]:
            raise ValueError(f"{unknown[0]!r} is none of {', '.join(LIMITS)}")
        for each in which:
            chapters(each)
    except ValueError as error:
        print(f"lessons: {error}", file=sys.stderr)
        return 2
    print(f"Lessons on {machine()}.\n", flush=True)
    return report([run_repeatedly(each, options.runs, options.busy) for each in which])
