"""`test`: everything that must hold before a change is committed."""

import os
import subprocess
import sys
import time

from scratch_ddp.commands.environment import ROOT

PYTEST = [sys.executable, "-m", "pytest", "-q"]
# A test starts two to four ranks, which wait for one another most of the time.
SIDE_BY_SIDE = [*PYTEST, f"-n{max(3, (os.cpu_count() or 2) // 2)}"]
CHECKS = {
    "ruff check": [sys.executable, "-m", "ruff", "check", "."],
    "ruff format": [sys.executable, "-m", "ruff", "format", "--check", "."],
    "tests": [*SIDE_BY_SIDE, "--dist=worksteal", "-m", "not measures_time", "tests"],
    "tests that measure time": [*PYTEST, "-m", "measures_time", "tests"],
    "lessons (strict nbval)": [*SIDE_BY_SIDE, "--dist=loadfile", "--nbval", "notebooks"],
}


def main(arguments: list[str]) -> int:
    """Run the checks to the end whatever fails on the way, or the one pytest call that the arguments make."""
    if arguments:
        return subprocess.call([sys.executable, "-m", "pytest", *arguments], cwd=ROOT)
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
