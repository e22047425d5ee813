"""Ending a rank together with everything that it has started, and nothing else.

A rank leads a process group, which its children usually stay in. Some leave it: torchrun starts its workers in sessions
of their own. On Linux the launcher therefore adopts what ranks leave behind, and looks up in /proc who is whose child.
"""

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Collection
from pathlib import Path

_ON_LINUX = sys.platform == "linux"
_DIE_WITH_PARENT, _ADOPT_ORPHANS = 1, 36  # PR_SET_PDEATHSIG and PR_SET_CHILD_SUBREAPER of prctl(2)


def die_with_parent() -> None:
    """SIGKILL for this process as soon as its parent is gone (Linux)."""
    if _ON_LINUX:
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends (Linux)."""
    if _ON_LINUX:
        ctypes.CDLL(None).prctl(_ADOPT_ORPHANS, 1)


def end_family(pid: int) -> None:
    """SIGKILL to a process that leads a process group, to that group, and to all its descendants."""
    descendants = _descendants(pid)
    end_group(pid)
    for number in [pid, *descendants]:  # the process itself too, if it has not come to make its own group yet
        _kill(number)


def end_group(pid: int) -> None:
    """SIGKILL to the process group of a rank. Its number stays taken as long as it has a member."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def end_orphans(ranks: Collection[int]) -> None:
    """SIGKILL to what this process has adopted: its children, save the ranks and what lives in a rank's session."""
    for pid in _children_of([os.getpid()]):
        with contextlib.suppress(ProcessLookupError):
            if pid not in ranks and os.getsid(pid) not in ranks:
                end_family(pid)


def end_children(limit: float = 1.0) -> None:
    """SIGKILL to all descendants of this process, also those that become its children meanwhile, and wait for it."""
    until = time.monotonic() + limit
    with contextlib.suppress(ChildProcessError):  # none left
        while time.monotonic() < until:
            end_orphans(())
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            time.sleep(0.005)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    newest = [pid]
    while newest := _children_of(newest):
        found += newest
    return found


def _children_of(parents: Collection[int]) -> list[int]:
    if not _ON_LINUX:
        return []
    children = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (folder / "stat").read_text(errors="replace").rsplit(")", 1)[1].split()
                if int(fields[1]) in parents and fields[0] != "Z":
                    children.append(int(folder.name))
    return children
