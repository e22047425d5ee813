"""`test`: everything that must hold before a change is committed."""

import subprocess
import sys
import time

from scratch_ddp.commands.lessons import ROOT

PYTEST = [sys.executable, "-m", "pytest"]
SOLVED = "tests/test_lessons_solved.py"
CHECKS = {
    "ruff check": [sys.executable, "-m", "ruff", "check", "."],
    "ruff format": [sys.executable, "-m", "ruff", "format", "--check", "."],
    "tests": [*PYTEST, "tests", f"--ignore={SOLVED}"],
    # Much of a lesson's time is waiting, so two of them run at once; each has its own kernel.
    "lessons (strict nbval)": [*PYTEST, "-n2", "--dist=loadfile", "--nbval", "notebooks"],
    "lessons, with answers": [*PYTEST, "-n2", "--dist=worksteal", SOLVED],
}


def main(arguments: list[str]) -> int:
    """Run the checks to the end whatever fails on the way, or the one pytest call that the arguments make."""
    if arguments:
        return subprocess.call([*PYTEST, *arguments], cwd=ROOT)
    verdicts = {}
    for name, command in CHECKS.items():
        print(f"\n── {name}", flush=True)
        started = time.monotonic()
        status = subprocess.call(command, cwd=ROOT, stdin=subprocess.DEVNULL)
        verdicts[name] = (status == 0, time.monotonic() - started)
    print()
    for name, (passed, seconds) in verdicts.items():
        print(f"{'✓' if passed else '✗'} {name:24}{seconds:6.0f} s")
    return 0 if all(passed for passed, _ in verdicts.values()) else 1
