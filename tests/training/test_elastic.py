"""A run that was interrupted goes on as if nothing had happened: the same losses, each item once an epoch."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from scratch_ddp.course.pages.light_training import light
from scratch_ddp.training import __main__ as command
from scratch_ddp.training.data import Batches, Item
from scratch_ddp.training.step_log import StepLog, read_steps
from tests.ranks import run_ranks

ITEMS, EPOCHS, BATCH = 160, 3, 16
PER_EPOCH = ITEMS // BATCH
STEPS = EPOCHS * PER_EPOCH
ARGUMENTS = ["--device=cpu", f"--epochs={EPOCHS}", "--dtype=float64", "--lr=0.02", "--every=4", "--strategy=bucketed"]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"}


def attempt(folder: Path, *options: str, sigterm_at: int = 0, on_rank: int = 0) -> str | int | None:
    """Run the command on this rank; return its exit status or last words. SIGTERM comes after a step, to one rank."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    os.environ.pop("RANK", None)
    light()
    command.ranks = lambda *_: contextlib.nullcontext((rank, dist.get_world_size() if dist.is_initialized() else 1))
    log = StepLog.after_step

    def after_step(self, window, history):
        log(self, window, history)
        if history.steps == sigterm_at and rank == on_rank:
            os.kill(os.getpid(), signal.SIGTERM)

    StepLog.after_step = after_step
    sys.argv = ["training", *ARGUMENTS, f"--checkpoints={folder}/saved", f"--step-log={folder}/log", *options]
    try:
        command.main()
    except SystemExit as ended:
        return ended.code


def attempt_on(ranks: int, folder: Path, *options: str, **when: int) -> tuple[list, str]:
    """The same on forked ranks: what each of them returned, and what the first one printed."""
    results = run_ranks(ranks, lambda: attempt(folder, *options, **when), capture=True)
    return [ended for ended, _ in results], results[0][1]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    assert attempt_on(1, folder)[0] == [None]
    return read_steps(folder / "log")


def is_the_same_run(folder: Path, uninterrupted: dict) -> bool:
    steps = read_steps(folder / "log")
    assert list(steps) == list(uninterrupted) == list(range(1, STEPS + 1))
    for epoch in range(EPOCHS):
        seen = [item for step in range(PER_EPOCH) for item in steps[epoch * PER_EPOCH + step + 1]["items"]]
        assert sorted(seen) == list(range(ITEMS))
    assert all(steps[step]["items"] == line["items"] for step, line in uninterrupted.items())
    return all(abs(steps[step]["loss"] - line["loss"]) < 1e-12 for step, line in uninterrupted.items())


def test_a_run_goes_on_with_another_number_of_ranks(uninterrupted, tmp_path):
    """Stopped twice: in the middle of an epoch, and after its last step but before it was evaluated."""
    stopped, printed = attempt_on(2, tmp_path, sigterm_at=6, on_rank=1)
    assert stopped == [143, 143] and "stopped by SIGTERM after step 6, saved; the same command goes on" in printed
    assert {path.name for path in (tmp_path / "saved").iterdir()} == {"step_00000004", "step_00000006"}
    stopped, printed = attempt_on(4, tmp_path, sigterm_at=2 * PER_EPOCH)
    assert stopped == [143] * 4 and "resumed after step 6" in printed and "epoch 1: loss" in printed
    ended, printed = attempt_on(2, tmp_path)
    assert ended == [None, None] and "resumed after step 20" in printed
    assert "epoch 1" not in printed and "epoch 2: loss" in printed and "epoch 3: loss" in printed
    assert {line["ranks"] for line in read_steps(tmp_path / "log").values()} == {2, 4}
    assert is_the_same_run(tmp_path, uninterrupted)


@pytest.mark.parametrize("strategy", ["zero", "fsdp"])
def test_sharded_state_goes_on_with_another_number_of_ranks(strategy, uninterrupted, tmp_path):
    attempt_on(2, tmp_path, f"--strategy={strategy}", sigterm_at=14)
    ended, printed = attempt_on(4, tmp_path, f"--strategy={strategy}")
    assert ended == [None] * 4 and "resumed after step 14" in printed
    assert is_the_same_run(tmp_path, uninterrupted)


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_damaged_or_half_written_checkpoint_is_never_taken(tmp_path):
    saved = tmp_path / "saved"
    attempt_on(2, tmp_path, sigterm_at=14)
    (saved / "step_00000014").rename(saved / "step_00000014.partial")
    _, printed = attempt_on(2, tmp_path, sigterm_at=15)
    assert "resumed after step 12" in printed
    assert {path.name for path in saved.iterdir()} == {"step_00000012", "step_00000015"}
    damage(next((saved / "step_00000015").glob("__1_*.distcp")))
    _, printed = attempt_on(2, tmp_path, sigterm_at=13)
    assert "step_00000015 is skipped: rank" in printed and "is damaged" in printed
    assert "resumed after step 12" in printed
    assert {path.name[5:] for path in saved.iterdir()} == {"00000012", "00000013", "00000015.damaged"}
    for name in ("step_00000012", "step_00000013"):
        damage(saved / name / ".metadata")
    (first, second), _ = attempt_on(2, tmp_path)
    assert second == 1 and "\n" not in first and "can be read, so move it away to start anew: rank" in first


def test_a_checkpoint_of_another_run_is_refused_in_a_sentence(tmp_path):
    others = {
        "--lr=0.01": "lr 0.02, but this one has lr 0.01",
        "--batch-size=8": "batch size 16, but this one has batch size 8",
        "--strategy=fsdp": "strategy replicas, but this one has strategy fsdp",
        "--max-length=9": "data .*, but this one has data",
    }
    attempt_on(2, tmp_path, sigterm_at=2)
    results = run_ranks(2, lambda: [attempt(tmp_path, option) for option in others])
    for first, second, says in zip(*results, others.values(), strict=True):
        assert second == 1 and first.startswith("scratch_ddp.training: ") and "\n" not in first
        assert re.search(says, first)


def test_only_interleaved_shards_may_go_on_with_another_number_of_ranks():
    def settings(ranks, kind):
        return Batches([Item([1], 0)] * 8, 4, 0, 0, ranks, kind).settings()

    assert settings(2, "interleaved") == settings(4, "interleaved")
    assert settings(2, "contiguous") != settings(4, "contiguous")


def test_a_folder_that_not_all_ranks_share_is_refused(tmp_path):
    def apart():
        from scratch_ddp.training import checkpoints

        checkpoints.PATIENCE = 0.3
        return attempt(tmp_path / str(dist.get_rank()))

    first, second = run_ranks(2, apart)
    assert "rank 1: " in first and "all hosts must share the folder" in first and second == 1


def test_options_that_make_no_sense(monkeypatch, capsys):
    for options, says in (
        (["--every=5"], "--checkpoints FOLDER is needed too"),
        (["--checkpoints=x", "--every=0"], "a whole number, 1 or more, is needed, not '0'"),
        (["--timeout=soon"], "a whole number, 1 or more, is needed, not 'soon'"),
    ):
        monkeypatch.setattr(sys, "argv", ["training", *options])
        with pytest.raises(SystemExit, match="2"):
            command.main()
        assert says in capsys.readouterr().err


def test_the_shared_store_is_warned_of(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert not command.loses_its_store()
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    assert command.loses_its_store() and "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in command.LOST_STORE


def start(folder: Path, *launcher: str, **environment: str) -> subprocess.Popen:
    """Start the command as a process, slowly enough to be interrupted."""
    options = [*ARGUMENTS, f"--checkpoints={folder}/saved", f"--step-log={folder}/log"]
    return subprocess.Popen(
        [sys.executable, *launcher, "-m", "scratch_ddp.course.pages.light_training", *options],
        env=ENVIRONMENT | {"LIGHT_SLEEP": "0.05"} | environment,
        stdout=subprocess.PIPE,
        text=True,
    )


def wait_for_step(folder: Path, step: int, deadline: float = 60) -> None:
    deadline += time.monotonic()
    while not (folder / "log").exists() or step not in read_steps(folder / "log"):
        assert time.monotonic() < deadline, "the run has not come so far"
        time.sleep(0.02)


def wait_for_checkpoint(folder: Path, deadline: float = 60) -> None:
    deadline += time.monotonic()
    while not any(re.fullmatch(r"step_\d{8}", path.name) for path in (folder / "saved").iterdir()):
        assert time.monotonic() < deadline, "no checkpoint is complete"
        time.sleep(0.02)


def test_sigterm_to_a_single_process(uninterrupted, tmp_path):
    run = start(tmp_path)
    wait_for_step(tmp_path, 6)
    run.terminate()
    printed = run.communicate(timeout=30)[0]
    assert run.returncode == 143 and "stopped by SIGTERM after step" in printed
    assert attempt_on(1, tmp_path)[0] == [None]
    assert is_the_same_run(tmp_path, uninterrupted)


def test_the_job_outlives_a_worker_of_one_of_two_hosts(uninterrupted, tmp_path):
    """Two torchrun agents, one rank each; the rank of the second host is killed."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    torchrun = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--max-restarts=1"]
    torchrun += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=test", "--local-addr=127.0.0.1"]
    torchrun += ["--monitor-interval=0.1"]
    variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "LIGHT_PIDS": str(tmp_path)}
    hosts = [
        start(tmp_path, *torchrun, f"--rdzv-conf=join_timeout=60,is_host={1 - host}", **variables) for host in (0, 1)
    ]
    try:
        wait_for_step(tmp_path, 6)
        wait_for_checkpoint(tmp_path)  # a thread writes it: on a busy machine it may end after step 6
        os.kill(int((tmp_path / "0.1").read_text()), signal.SIGKILL)
        printed = "".join(host.communicate(timeout=90)[0] for host in hosts)
        assert [host.returncode for host in hosts] == [0, 0]
    finally:
        for host in hosts:
            host.kill()
    assert "resumed after step" in printed
    assert is_the_same_run(tmp_path, uninterrupted)
