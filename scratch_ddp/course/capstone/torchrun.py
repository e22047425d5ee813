"""Runs a module under torchrun for a limited time; each rank says where in the learner's file it has failed."""

import contextlib
import os
import re
import shlex
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

from scratch_ddp.cells.processes import kill_family
from scratch_ddp.course.pages.interrupted_run import start

RANKS = 2
LIMIT = 240  # seconds for a run, whatever it does
TIMEOUT = 20  # seconds that a rank waits for another, also at the start, on a busy machine
OTHERS = 3  # seconds that ranks get to say where they are, after the first has
_LOST = ("Timed out", "timed out", "timeout", "Connection closed", "Connection reset", "Broken pipe")  # what gloo says
_SAID = re.compile(r"rank (\d) (waits|raises)(.*)")


def run(module: str, *arguments: object, restarts: int = 0) -> tuple[str, list[str]]:
    """Run a module on RANKS ranks of this machine. Return what went wrong, or "", and the lines it has printed."""
    options = f"--nproc-per-node {RANKS} --max-restarts {restarts} --monitor-interval 0.1 "
    options += "--rdzv-backend c10d --rdzv-endpoint 127.0.0.1:0 --local-addr 127.0.0.1"
    given = shlex.join(map(str, arguments))
    process = start(f"torchrun {options} -m {module} {given}", TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    try:
        printed, _ = process.communicate(timeout=LIMIT)
        status = process.returncode
    except subprocess.TimeoutExpired:
        kill_family(process.pid)
        printed, status = process.communicate()[0], None
    return complaint(status, printed.splitlines()), printed.splitlines()


def complaint(status: int | None, printed: list[str]) -> str:
    """What went wrong in a run with this exit status (None: it was ended after LIMIT seconds), or ""."""
    if status == 0:
        return ""
    said = {found[1]: found for line in printed if (found := _SAID.search(line))}
    raised = [found[0] for found in said.values() if found[2] == "raises"]
    if said:  # a cause before what follows from it
        return "; ".join(sorted(raised or [found[0] for found in said.values()]))
    if status is None:
        return f"it had not ended after {LIMIT} seconds"
    return f"it ended with status {status}: {(printed or ['it printed nothing'])[-1][:300]}"


@contextlib.contextmanager
def says_where(path: Path) -> Iterator[None]:
    """Around what runs the learner's file on a rank: print what it raises, or at which line it waits in vain."""
    try:
        yield
    except (Exception, SystemExit) as error:
        if isinstance(error, SystemExit):
            if not error.code:
                raise
            error = error.__context__ or error  # the training command ends with what was raised
        frames = [each for each in traceback.extract_tb(error.__traceback__) if each.filename == str(path)]
        place = f"a place outside of {path.name}"
        if frames:
            place = f"{path.name}, line {frames[-1].lineno}: `{frames[-1].line}`"
        waits = isinstance(error, RuntimeError) and any(words in str(error) for words in _LOST)
        text = f"waits at {place}" if waits else f"raises {type(error).__name__}: {error} ({place})"
        print(f"rank {os.environ['RANK']} {' '.join(text.split())[:300]}", flush=True)
        time.sleep(OTHERS)  # an end of this rank would end the others before they have said where they are
        sys.exit(1)
