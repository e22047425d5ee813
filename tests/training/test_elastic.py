"""A run that was interrupted goes on as if nothing had happened: the same losses, each item once an epoch."""

import contextlib
import os
import re
import resource
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
from scratch_ddp.training.__main__ import log_step, read_steps
from tests.ranks import captured, run_ranks

ITEMS, EPOCHS, BATCH = 160, 3, 16
PER_EPOCH = ITEMS // BATCH
STEPS = EPOCHS * PER_EPOCH
ARGUMENTS = ["--device=cpu", f"--epochs={EPOCHS}", "--dtype=float64", "--lr=0.02", "--every=4", "--strategy=bucketed"]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"}


def attempt(folder: Path, *options: str, sigterm_at: int = 0, on_rank: int = 0, full_at: int = 0) -> str | int | None:
    """Run the command on this rank; return its exit status or last words.

    After step `sigterm_at` SIGTERM comes to one rank, after `full_at` its disk is full.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    os.environ.pop("RANK", None)
    light()
    command.ranks = lambda *_: contextlib.nullcontext((rank, dist.get_world_size() if dist.is_initialized() else 1))

    def log_and_interrupt(path, window, history):
        log_step(path, window, history)
        if len(history.losses) == sigterm_at and rank == on_rank:
            os.kill(os.getpid(), signal.SIGTERM)
        if len(history.losses) == full_at and rank == on_rank:
            wait_for(lambda: full_at - 2 in saved(folder))  # what a thread is still writing
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))

    command.log_step = log_and_interrupt
    sys.argv = ["training", *ARGUMENTS, f"--checkpoints={folder}/saved", f"--step-log={folder}/log", *options]
    try:
        command.main()
    except SystemExit as ended:
        return ended.code


def attempt_on(ranks: int, folder: Path, *options: str, **when: int) -> tuple[list, str]:
    """The same on forked ranks: what each of them returned, and what the first one printed."""
    results = run_ranks(ranks, captured, lambda: attempt(folder, *options, **when))
    return [ended for ended, _ in results], results[0][1]


def saved(folder: Path) -> list[int]:
    """The steps of the complete checkpoints."""
    return sorted(int(path.parent.name[5:]) for path in (folder / "saved").glob("step_*/.metadata"))


def wait_for(so_far, deadline: float = 60) -> None:
    deadline += time.monotonic()
    while not so_far():
        assert time.monotonic() < deadline, "the run has not come so far"
        time.sleep(0.02)


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


def test_a_run_goes_on_with_another_number_of_ranks_and_another_strategy(uninterrupted, tmp_path):
    """Stopped four times: in the middle of an epoch, and after its last step but before it was evaluated."""
    stopped, printed = attempt_on(2, tmp_path, sigterm_at=6, on_rank=1)
    assert stopped == [143, 143] and "stopped by SIGTERM after step 6, saved; the same command goes on" in printed
    assert saved(tmp_path) == [4, 6]
    stopped, printed = attempt_on(4, tmp_path, "--strategy=zero", sigterm_at=2 * PER_EPOCH)
    assert stopped == [143] * 4 and "resumed after step 6" in printed and "epoch 1: loss" in printed
    stopped, printed = attempt_on(2, tmp_path, "--strategy=fsdp", sigterm_at=23)
    assert stopped == [143, 143] and "resumed after step 20" in printed
    assert "epoch 1" not in printed and "epoch 2: loss" in printed
    assert attempt_on(4, tmp_path, "--strategy=fsdp", sigterm_at=26)[0] == [143] * 4
    ended, printed = attempt_on(2, tmp_path, "--strategy=zero")
    assert ended == [None, None] and "resumed after step 26" in printed and "epoch 3: loss" in printed
    assert {line["ranks"] for line in read_steps(tmp_path / "log").values()} == {2, 4}
    assert is_the_same_run(tmp_path, uninterrupted) and saved(tmp_path) == [28, 30]


def test_a_damaged_checkpoint_is_refused_by_name_and_one_that_was_cut_short_is_passed_over(tmp_path):
    folder = tmp_path / "saved"
    attempt_on(2, tmp_path, sigterm_at=14)
    (folder / "step_00000014" / ".metadata").unlink()
    _, printed = attempt_on(2, tmp_path, sigterm_at=15)
    assert "resumed after step 12" in printed and saved(tmp_path) == [12, 15]
    piece = next((folder / "step_00000015").glob("__1_*.distcp"))
    whole = piece.read_bytes()
    for damage in (lambda: piece.write_bytes(whole[: len(whole) // 2]), piece.unlink):
        damage()
        (first, second), _ = attempt_on(2, tmp_path)
        assert second == 1 and "\n" not in first
        assert re.search("step_00000015 can't be loaded: .*; step_00000012 is whole", first)
    (folder / "step_00000015").rename(tmp_path / "away")
    assert "resumed after step 12" in attempt_on(2, tmp_path, sigterm_at=13)[1]
    for name in ("step_00000012", "step_00000013"):
        (folder / name / ".metadata").write_bytes(b"nothing")
    (first, second), _ = attempt_on(2, tmp_path)
    assert second == 1 and "\n" not in first and "no older one is whole: move" in first


def test_a_full_disk_ends_the_run_with_a_sentence_and_the_last_whole_checkpoint_goes_on(uninterrupted, tmp_path):
    (first, second), _ = attempt_on(2, tmp_path, full_at=10, on_rank=1)
    assert second == 1 and "\n" not in first and "can't be written" in first and "last complete: step_00000008" in first
    ended, printed = attempt_on(2, tmp_path)
    assert ended == [None, None] and "resumed after step 8" in printed
    assert is_the_same_run(tmp_path, uninterrupted)


def test_a_checkpoint_of_another_run_and_a_folder_that_is_not_shared_are_refused_in_a_sentence(tmp_path):
    attempt_on(2, tmp_path, sigterm_at=2)
    for option, says in {
        "--lr=0.01": "lr 0.02, but this one has lr 0.01",
        "--batch-size=8": "batch_size 16, but this one has batch_size 8",
        "--checkpoints=own": "hosts must share it",
    }.items():

        def apart(option=option):
            os.makedirs(own := tmp_path / str(dist.get_rank()), exist_ok=True)
            os.chdir(own)
            return attempt(tmp_path, option)

        first, second = run_ranks(2, apart)
        assert second == 1 and first.startswith("scratch_ddp.training: ") and "\n" not in first and says in first


def start(folder: Path, *launcher: str, **environment: str) -> subprocess.Popen:
    """Start the command as a process, slowly enough to be interrupted."""
    options = [*ARGUMENTS, f"--checkpoints={folder}/saved", f"--step-log={folder}/log"]
    return subprocess.Popen(
        [sys.executable, *launcher, "-m", "scratch_ddp.course.pages.light_training", *options],
        env=ENVIRONMENT | {"LIGHT_SLEEP": "0.05", "LIGHT_PIDS": str(folder)} | environment,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("torchrun", [False, True])
def test_sigterm_to_a_process_or_to_torchrun_saves_and_leaves(torchrun, uninterrupted, tmp_path):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"] if torchrun else []
    run = start(tmp_path, *launcher)
    wait_for(lambda: (tmp_path / "log").exists() and 6 in read_steps(tmp_path / "log"))
    run.terminate()
    printed = run.communicate(timeout=60)[0]
    assert "stopped by SIGTERM after step" in printed
    assert torchrun or run.returncode == 143
    assert attempt_on(1, tmp_path)[0] == [None]
    assert is_the_same_run(tmp_path, uninterrupted)


def test_the_job_outlives_a_worker_of_one_of_two_hosts(uninterrupted, tmp_path):
    """Two torchrun agents, one rank each; the rank of the second host is killed."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    torchrun = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--max-restarts=1"]
    torchrun += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=test", "--local-addr=127.0.0.1"]
    torchrun += ["--monitor-interval=0.1"]
    variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    hosts = [
        start(tmp_path, *torchrun, f"--rdzv-conf=join_timeout=60,is_host={1 - host}", **variables) for host in (0, 1)
    ]
    try:
        wait_for(lambda: (tmp_path / "log").exists() and 6 in read_steps(tmp_path / "log"))
        wait_for(lambda: saved(tmp_path))  # a thread writes it: on a busy machine it may end after step 6
        os.kill(int((tmp_path / "0.1").read_text()), signal.SIGKILL)
        printed = "".join(host.communicate(timeout=90)[0] for host in hosts)
        assert [host.returncode for host in hosts] == [0, 0]
    finally:
        for host in hosts:
            host.kill()
    assert "resumed after step" in printed
    assert is_the_same_run(tmp_path, uninterrupted)


def test_the_shared_store_is_warned_of(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in attempt_on(1, tmp_path, sigterm_at=1)[1]
