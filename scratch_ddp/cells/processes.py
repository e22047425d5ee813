"""Ending a rank together with everything that it has started, and nothing else.

A rank leads a process group, and its children usually stay in it. Some leave it: torchrun starts its workers in
sessions of their own. So all descendants are looked up as well. On Linux the launcher also becomes the parent of
processes whose own parent, a rank or its child, has ended.
"""

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Collection

import psutil

_ON_LINUX = sys.platform == "linux"
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # see prctl(2)


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """This process gets the signal as soon as its parent is gone; 0 for none (Linux)."""
    if _ON_LINUX:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def become_subreaper() -> None:
    """This process becomes the parent of each descendant whose own parent ends (Linux)."""
    if _ON_LINUX:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def kill_family(pid: int) -> None:
    """SIGKILL to a child of this process, to the process group that it leads, and to all its descendants."""
    members = []
    with contextlib.suppress(psutil.Error):
        members.append(psutil.Process(pid))  # the process too: it may not lead its own group yet
        members += members[0].children(recursive=True)
    kill_group(pid)
    for member in members:
        with contextlib.suppress(psutil.Error):
            member.kill()


def kill_group(pid: int) -> None:
    """SIGKILL to the process group of a rank. Its number is not reused as long as the group has a member."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def kill_orphans(ranks: Collection[int]) -> None:
    """SIGKILL to the children of this process that are neither ranks nor in a rank's session."""
    for child in psutil.Process().children():
        with contextlib.suppress(ProcessLookupError):
            if child.pid not in ranks and os.getsid(child.pid) not in ranks:
                kill_family(child.pid)


def kill_descendants(limit: float = 1.0) -> None:
    """SIGKILL to all descendants of this process, until none is left or `limit` seconds have passed."""
    until = time.monotonic() + limit
    with contextlib.suppress(ChildProcessError):  # none left
        while time.monotonic() < until:
            kill_orphans(())
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            time.sleep(0.005)
