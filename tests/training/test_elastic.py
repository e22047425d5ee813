"""A run that was interrupted goes on as if nothing had happened: the same losses, each item once an epoch."""

import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from scratch_ddp.course.pages.light_training import light
from scratch_ddp.training import __main__ as command
from scratch_ddp.training.__main__ import log_step, read_steps
from tests.ranks import run_ranks
from tests.training.cases import run_command

ITEMS, EPOCHS, BATCH = 160, 3, 16
PER_EPOCH = ITEMS // BATCH
STEPS = EPOCHS * PER_EPOCH
ARGUMENTS = [f"--epochs={EPOCHS}", "--dtype=float64", "--lr=0.02", "--every=4", "--strategy=bucketed"]


def attempt(folder: Path, *options: str, sigterm_at: int = 0, on_rank: int = 0, full_at: int = 0) -> tuple:
    """`run_command`. After step `sigterm_at` SIGTERM comes to one rank, after `full_at` its disk is full."""
    light()

    def log_and_interrupt(path, batch, history):
        log_step(path, batch, history)
        if dist.get_rank() != on_rank:
            return
        if len(history.losses) == sigterm_at:
            os.kill(os.getpid(), signal.SIGTERM)
        if len(history.losses) == full_at:
            wait_for(lambda: full_at - 2 in saved(folder))  # what a thread is still writing
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))

    command.log_step = log_and_interrupt
    return run_command(*ARGUMENTS, f"--checkpoints={folder}/saved", f"--step-log={folder}/log", *options)


def attempt_on(ranks: int, folder: Path, *options: str, **when: int) -> tuple[list, str]:
    """The same on forked ranks: how each of them ended, and what the first one printed."""
    results = run_ranks(ranks, lambda: attempt(folder, *options, **when))
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
    """Stopped three times: in the middle of an epoch, and after its last step but before it was evaluated."""
    stopped, printed = attempt_on(2, tmp_path, sigterm_at=6, on_rank=1)
    assert stopped == [143, 143] and "stopped by SIGTERM after step 6, saved; the same command goes on" in printed
    assert saved(tmp_path) == [4, 6]
    stopped, printed = attempt_on(4, tmp_path, "--strategy=zero", sigterm_at=2 * PER_EPOCH)
    assert stopped == [143] * 4 and "resumed after step 6" in printed and "epoch 1: loss" in printed
    stopped, printed = attempt_on(2, tmp_path, "--strategy=fsdp", sigterm_at=23)
    assert stopped == [143, 143] and "resumed after step 20" in printed
    assert "epoch 1" not in printed and "epoch 2: loss" in printed
    ended, printed = attempt_on(4, tmp_path, "--strategy=zero")
    assert ended == [None] * 4 and "resumed after step 23" in printed and "epoch 3: loss" in printed
    assert {line["ranks"] for line in read_steps(tmp_path / "log").values()} == {2, 4}
    assert is_the_same_run(tmp_path, uninterrupted) and saved(tmp_path) == [28, 30]
    ended, printed = attempt_on(1, tmp_path)
    assert ended == [None] and "epoch 2" not in printed and "epoch 3: loss" in printed and " 0 steps in" in printed


def on_both(change) -> None:
    """Change files on the first rank while the second waits."""
    if dist.get_rank() == 0:
        change()
    dist.barrier()


def with_damaged_checkpoints(folder: Path) -> list:
    """How a run of two ranks ends or what it prints: cut short, a piece truncated, a piece gone, nothing whole."""
    saved_in = folder / "saved"
    attempt(folder, sigterm_at=14)
    on_both((saved_in / "step_00000014" / ".metadata").unlink)
    found = [attempt(folder, sigterm_at=15)[1]]
    piece = next((saved_in / "step_00000015").glob("__1_*.distcp"))
    dist.barrier()
    for damage in (lambda: os.truncate(piece, piece.stat().st_size // 2), piece.unlink):
        on_both(damage)
        found.append(attempt(folder)[0])
    on_both(lambda: (saved_in / "step_00000015").rename(folder / "away"))
    return [*found, attempt(folder, sigterm_at=13)[1]]


def test_a_damaged_checkpoint_is_refused_by_name_and_one_that_was_cut_short_is_passed_over(tmp_path):
    first, second = run_ranks(2, with_damaged_checkpoints, tmp_path)
    assert all("resumed after step 12" in printed for printed in (first[0], first[3]))
    for words in first[1:3]:
        assert "\n" not in words
        assert re.search("step_00000015 can't be loaded: .*; move it away, .* goes on from step_00000012", words)
    assert second[1:3] == [1, 1] and saved(tmp_path) == [12, 13]


def test_a_full_disk_ends_the_run_with_a_sentence_and_the_last_whole_checkpoint_goes_on(uninterrupted, tmp_path):
    (first, second), _ = attempt_on(2, tmp_path, full_at=10, on_rank=1)
    assert second == 1 and "\n" not in first and "can't be written" in first and "last complete: step_00000008" in first
    ended, printed = attempt_on(2, tmp_path)
    assert ended == [None, None] and "resumed after step 8" in printed
    assert is_the_same_run(tmp_path, uninterrupted)


def refused(folder: Path) -> list:
    attempt(folder, sigterm_at=2)
    os.makedirs(own := folder / str(dist.get_rank()))
    os.chdir(own)
    return [attempt(folder, option)[0] for option in ("--lr=0.01", "--batch-size=8", "--checkpoints=own")]


def test_a_checkpoint_of_another_run_and_a_folder_that_is_not_shared_are_refused_in_a_sentence(tmp_path):
    first, second = run_ranks(2, refused, tmp_path)
    says = ("lr 0.02, but this one has lr 0.01", "batch_size 16, but this one has batch_size 8", "hosts must share it")
    for words, piece in zip(first, says, strict=True):
        assert words.startswith("scratch_ddp.training: ") and "\n" not in words and piece in words
    assert second == [1, 1, 1]


def test_sigterm_to_torchrun_saves_and_leaves(tmp_path):
    """The command runs as a process, slowly enough to be interrupted."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    options = [*ARGUMENTS, "--device=cpu", f"--checkpoints={tmp_path}/saved", f"--step-log={tmp_path}/log"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "LIGHT_SLEEP": "0.05"}
    environment["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    line = [*launcher, "-m", "scratch_ddp.course.pages.light_training", *options]
    run = subprocess.Popen(line, env=environment, stdout=subprocess.PIPE, text=True)
    wait_for(lambda: (tmp_path / "log").exists() and 6 in read_steps(tmp_path / "log"))
    run.terminate()
    said = re.search(r"stopped by SIGTERM after step (\d+), saved", run.communicate(timeout=60)[0])
    assert saved(tmp_path)[-1] == int(said[1])
