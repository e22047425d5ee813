"""The magics: options, mistakes, messages, and what other machines can reach."""

import re
import sys
import time
from pathlib import Path

import pytest
import torch

from scratch_ddp.cells.launcher import count_gpus
from tests.kernel import Kernel
from tests.processes import listening_addresses, listening_beyond_loopback

NO_RANKS = "no ranks are running. %dist_init -n 4 starts four."


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        *[(cell, NO_RANKS) for cell in ("%sync", "%dist_mode -e", "%%rank [0]\n1")],
        ("%dist_init -n 0", "-n: 0: write a whole number, at least 1. What it takes: %dist_init [-"),
        ("%dist_init -n", "expected one argument"),
        ("%dist_init -a otherhost", "invalid choice: 'otherhost' (choose from "),
        ("%dist_init --bogus", "unrecognized arguments: --bogus"),
        ("%dist_init -n 2 --backend mpi", "argument --backend: invalid choice: 'mpi' (choose from "),
    ],
)
def test_what_can_not_be_done_is_an_error_of_the_cell(bare, cell, message):
    result = bare.run(cell)
    assert result.status == "error" and message in result.message and not result.text()
    assert "%dist_init" in result.message or "Write" in result.message or "Leave" in result.message
    assert bare.run("%dist_status").text() == "No ranks are running.\n"


FIRST = "total = torch.ones(1)\ndist.all_reduce(total)\nprint(total.item())"


def test_ranks_that_are_no_forks(monkeypatch, tmp_path):
    """As on macOS: each rank is a fresh Python, which takes longer and works the same, beside any file of a learner."""
    (tmp_path / "random.py").write_text("raise ImportError('the learner has called it so')")
    monkeypatch.chdir(tmp_path)
    with Kernel(cluster=2, env={"SCRATCH_DDP_START": "spawn"}) as kernel:
        assert kernel.run(FIRST).text() == "2.0   ← ranks 0–1\n"
        assert "rank 1 left with exit code 3" in kernel.run("%%rank [1]\nimport os\nos._exit(3)").message


@pytest.mark.parametrize(("platform", "count"), [("linux", 3), ("darwin", 0)])
def test_gpus_are_counted_also_where_ranks_are_no_forks(monkeypatch, platform, count):
    monkeypatch.setenv("SCRATCH_DDP_START", "spawn")
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(torch.version, "cuda", "12.4")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert count_gpus() == count


def test_plain_gloo_on_demand(bare):
    assert "ready" in bare.run("%dist_init -n 2 --backend gloo").text()
    assert bare.run("dist.get_backend(), type(dist.group.WORLD).__name__").text().startswith("('gloo', 'ProcessGroup')")
    cell = bare.start("import time\ndel device\ntime.sleep(30)")
    time.sleep(0.5)
    bare.interrupt()
    assert "All variables are kept" in bare.finish(cell).message
    again = bare.run("total = torch.ones(1)\ndist.all_reduce(total)\nprint(total.item())")
    assert "2.0   ← ranks 0–1" in again.text(), again.traceback
    bare.run("%dist_shutdown")


def test_magics_that_tell_and_set(four_ranks):
    pids = four_ranks.pids()
    status = four_ranks.run("%dist_status").text()
    for rank, pid in enumerate(pids):
        assert f"rank {rank}   process {pid}   cpu   ready" in status
    assert "Plain cells run on every rank." in status
    debug = four_ranks.run("%dist_debug").text()
    assert "launcher: process" in debug and status in debug
    assert four_ranks.run("%sync").outputs == []
    assert "4 ranks are running already" in four_ranks.run("%dist_init -n 2").message


def test_loading_again_keeps_the_ranks_and_the_magics(four_ranks):
    pids = four_ranks.pids()
    four_ranks.run("%reload_ext scratch_ddp")
    four_ranks.run("%load_ext scratch_ddp")
    assert "its magics stay" in four_ranks.run("%load_ext nbdistributed").text()
    assert four_ranks.pids() == pids
    assert four_ranks.run("%%rank[0]\n1").text() == "1   ← rank 0\n"


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads /proc")
def test_nothing_listens_beyond_this_machine(four_ranks):
    four_ranks.run("everyone = dist.new_group([0, 1])")
    launcher = int(re.search(r"launcher: process (\d+)", four_ranks.run("%dist_debug").text())[1])
    pids = [*four_ranks.pids(), launcher]
    assert any(map(listening_addresses, pids)), "gloo listens somewhere: the test would find nothing otherwise"
    assert listening_beyond_loopback(pids) == []
    assert listening_addresses(launcher) == set()


def test_no_message_is_unpickled():
    import scratch_ddp.cells

    serialises = re.compile(r"\b(pickle|marshal|torch\.load|multiprocessing)\b")
    modules = Path(scratch_ddp.cells.__file__).parent.rglob("*.py")
    assert not [module.name for module in modules if serialises.search(module.read_text())]
