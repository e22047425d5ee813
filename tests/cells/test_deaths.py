"""Ranks, launchers and kernels that die: what is said, and that nothing is left behind."""

import contextlib
import os
import re
import signal
import subprocess
import threading
import time
from pathlib import Path

import psutil
import pytest

from tests.kernel import Kernel, alive, wait_until_gone

FAMILY = """
import os, subprocess, sys
quiet = dict(stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
children = [subprocess.Popen(["sleep", "600"], **quiet)]
sleeper = "import subprocess; subprocess.run(['sleep', '600'])"
children.append(subprocess.Popen([sys.executable, "-c", sleeper], **quiet))
if {own_session}:
    children.append(subprocess.Popen(["sleep", "600"], start_new_session=True, **quiet))
print(*[child.pid for child in children])
"""


def launcher_of(kernel: Kernel) -> int:
    return int(re.search(r"launcher: process (\d+)", kernel.run("%dist_debug").text())[1])


def start_family(kernel: Kernel, own_session: bool = True) -> list[int]:
    """Children and grandchildren that ranks have started."""
    text = kernel.run(FAMILY.format(own_session=own_session)).text()
    children = [int(pid) for pid in re.findall(r"\b\d{2,}\b", text)]
    command, found, deadline = ["pgrep", "-P", ",".join(map(str, children))], [], time.monotonic() + 10
    while len(found) < 2 and time.monotonic() < deadline:  # the grandchildren start
        found = subprocess.run(command, capture_output=True, text=True).stdout.split()
    assert len(children) >= 4 and len(found) >= 2 and all(map(alive, children))
    return [*children, *map(int, found)]


# A rank dies


def test_a_rank_killed_while_idle_is_named_at_the_next_cell(four_ranks):
    pids = four_ranks.pids()
    os.kill(pids[2], signal.SIGKILL)
    time.sleep(0.05)
    result = four_ranks.run("print('never')")
    assert "rank 2 was ended by SIGKILL (somebody ended it, or the machine ran out of memory)" in result.message
    assert "%dist_init starts a new one" in result.message and result.seconds < 5 and not result.text()
    assert "SIGKILL" in four_ranks.run("%dist_status").text()
    assert "Ranks 0–3 ready" in four_ranks.run("%dist_init -n 4").text()
    assert len(four_ranks.pids()) == 4
    wait_until_gone(pids, 10)


def test_a_rank_killed_inside_a_collective_is_named_with_its_call_and_its_last_words(four_ranks):
    pids = four_ranks.pids()
    code = "if rank == 1: print('famous last words')\nif rank: dist.all_reduce(torch.ones(3))\nwhile rank == 0: pass"
    threading.Timer(0.5, lambda: os.kill(pids[1], signal.SIGKILL)).start()
    result = four_ranks.run(code)
    assert "rank 1 was ended by SIGKILL" in result.message
    assert "its last call: all_reduce (SUM) of 3 × float32" in result.message
    assert "── last output of rank 1 ──\nfamous last words" in result.traceback
    assert result.seconds < 5


# Everything ends


def folders(place: Path) -> list[Path]:
    """What the ranks of kernels with this TMPDIR have there."""
    return list(place.glob("scratch-ddp-*"))


@contextlib.contextmanager
def two_ranks(**options):
    kernel = Kernel(cluster=2, **options)
    try:
        with kernel:
            yield kernel
    except RuntimeError:  # the kernel is gone already
        pass


def test_shutdown_reset_and_restart_leave_nothing(tmp_path):
    with two_ranks(env={"TMPDIR": str(tmp_path)}) as kernel:
        ended = [*kernel.pids(), *start_family(kernel)]
        assert kernel.run("%dist_shutdown").text() == "Ranks 0–1 ended.\n"
        wait_until_gone(ended, 10)
        kernel.run("%dist_init -n 2")
        ended = kernel.pids()
        assert kernel.run("%dist_reset").text() == "Ranks 0–1 ended.\n"
        wait_until_gone(ended, 10)
        kernel.run("%dist_init -n 2")
        ended = [*kernel.pids(), *start_family(kernel), launcher_of(kernel)]
        assert folders(tmp_path)
        kernel.restart()
        wait_until_gone(ended, 10)
        assert not folders(tmp_path)
        kernel.run("%load_ext scratch_ddp")
        assert "Ranks 0–1 ready" in kernel.run("%dist_init -n 2").text()
        ended = [*kernel.pids(), launcher_of(kernel)]
    wait_until_gone(ended, 10)
    assert not folders(tmp_path)


def test_stop_while_ranks_start_leaves_none(bare):
    bare.run("%dist_init -n 1")
    launcher = psutil.Process(launcher_of(bare))
    bare.run("%dist_reset")
    for after in (0.02, 0.1, 0.3):
        cell = bare.start("%dist_init -n 24")
        time.sleep(after)
        bare.interrupt()
        assert bare.finish(cell).error["ename"] in ("RankInterrupt", "KeyboardInterrupt")
        wait_until_gone([child.pid for child in launcher.children()], 10)
    assert bare.run("%dist_status").text() == "No ranks are running.\n"
    assert "Rank 0 ready" in bare.run("%dist_init -n 1").text()
    bare.run("%dist_shutdown")


def killed(kernel: Kernel, place: Path, ended: list[int]) -> None:
    """Kill a kernel and see that these processes end within two seconds, and that nothing is left in its TMPDIR."""
    assert folders(place)
    kernel.kill()
    wait_until_gone(ended, 2)
    assert not folders(place)
    kernel.client.stop_channels()
    kernel.manager.cleanup_resources()


@pytest.mark.measures_time
def test_a_killed_kernel_leaves_nothing(tmp_path):
    """Whether a rank waits for another, computes, or has nothing to do."""
    kernel = Kernel(cluster=3, env={"TMPDIR": str(tmp_path)}).__enter__()
    ended = [*kernel.pids(), *start_family(kernel), launcher_of(kernel)]
    kernel.start("if rank == 0: dist.recv(torch.ones(1), src=1)\nwhile rank == 1: pass")
    time.sleep(0.3)
    killed(kernel, tmp_path, ended)


@pytest.mark.measures_time
def test_a_kernel_that_is_killed_while_the_launcher_imports_leaves_nothing(tmp_path):
    (tmp_path / "endless.py").write_text("import time\ntime.sleep(600)")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    kernel = Kernel(env={"TMPDIR": str(tmp_path), "PYTHONPATH": path, "SCRATCH_DDP_PRELOAD": "endless"}).__enter__()
    kernel.run("%load_ext scratch_ddp")
    launcher = launcher_of(kernel)
    time.sleep(0.3)
    killed(kernel, tmp_path, [launcher])


def test_a_killed_launcher_takes_everything_with_it_and_is_started_anew(tmp_path):
    with two_ranks(env={"TMPDIR": str(tmp_path)}) as kernel:
        launcher = launcher_of(kernel)
        ended = [*kernel.pids(), *start_family(kernel, own_session=False), launcher]
        assert folders(tmp_path)
        os.kill(launcher, signal.SIGKILL)
        wait_until_gone(ended, 10)
        assert not folders(tmp_path)
        assert "ended with the process that starts ranks" in kernel.run("print('never')").message
        assert "Ranks 0–1 ready" in kernel.run("%dist_init -n 2", timeout=90).text()
        assert len(kernel.pids()) == 2


def test_two_notebooks_do_not_notice_each_other(four_ranks):
    pids = four_ranks.pids()
    four_ranks.run("kept = rank")
    with two_ranks() as other:
        assert not set(other.pids()) & set(pids)
        assert other.run("x = torch.ones(1)\ndist.all_reduce(x)\nx.item()").text() == "2.0   ← ranks 0–1\n"
        loop = other.start("while True: pass")
        time.sleep(0.2)
        assert four_ranks.run("x = torch.ones(1)\ndist.all_reduce(x)\nx.item()").text() == "4.0   ← ranks 0–3\n"
        other.interrupt()
        assert "ranks 0–1 are in line 1" in other.finish(loop).message
        other.run("%dist_reset")
    assert four_ranks.pids() == pids and four_ranks.run("assert kept == rank").status == "ok"
