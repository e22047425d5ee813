"""`python -m scratch_ddp.benchmark collectives`: on ranks of its own, under torchrun, and what it refuses."""

import os
import re
import subprocess
import sys
import termios

import pytest

from scratch_ddp.benchmark import collectives as collectives_command
from scratch_ddp.benchmark.__main__ import main
from scratch_ddp.instruments.bandwidth import load_machine

COMMAND = ["-m", "scratch_ddp.benchmark", "collectives"]
QUICK = ["--sizes", "1KiB", "64KiB", "1MiB", "--seconds", "0.02"]


@pytest.fixture
def run(tmp_path, monkeypatch, capfd):
    """The command in this process, in a folder of its own: (exit status, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    for name in ("TORCHELASTIC_RUN_ID", "RANK"):
        monkeypatch.delenv(name, raising=False)

    def command(*arguments):
        monkeypatch.setattr(sys, "argv", ["benchmark", "collectives", *arguments])
        return main(), *capfd.readouterr()

    return command


def sizes_in(table):
    assert "\nall_reduce, gloo:\n" in table
    return re.findall(r"^\| +(\d) \| +(\d+ \w+) ", table, re.MULTILINE)


def test_on_ranks_of_its_own(run):
    status, printed, said = run(*QUICK, "--ranks", "3", "2", "3", "--save")
    assert status == 0 and not said, said  # no bar where stderr is no terminal
    assert sizes_in(printed) == [(n, size) for n in "32" for size in ("1 KiB", "64 KiB", "1 MiB")]
    assert "1 MiB = 2^20 bytes" in printed and "though it says GB/s" in printed
    assert "No NCCL for [3, 2] ranks: it wants a GPU for each, and there are 0." in printed
    if "all_reduce, gloo, 2 ranks: α =" in printed:
        assert load_machine().beta > 0
    else:  # a busy machine's times may make no line, which is said
        assert "a message can't cost less than nothing" in printed


def test_under_torchrun(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *COMMAND, *QUICK]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert sizes_in(ended.stdout) == [("2", size) for size in ("1 KiB", "64 KiB", "1 MiB")]


def test_a_bar_where_stderr_is_a_terminal(tmp_path):
    ours, theirs = os.openpty()
    termios.tcsetwinsize(ours, (24, 100))
    command = [sys.executable, *COMMAND, *QUICK, "--ranks", "2"]
    ended = subprocess.run(command, cwd=tmp_path, stderr=theirs, stdout=subprocess.PIPE, text=True, timeout=120)
    shown = os.read(ours, 100_000).decode()
    os.close(theirs)
    os.close(ours)
    assert ended.returncode == 0 and "2 ranks, 64 KiB" in shown and "2/3" in shown
    assert "64 KiB:" not in ended.stdout


@pytest.mark.parametrize("arguments, says", [
    (["--sizes", "1XB"], "'1XB' is no size"),
    (["--ranks", "1"], "a collective is between 2 ranks or more"),
    (["--operations", "sum"], "no operation is called 'sum'"),
    (["--backend", "nccl", "--ranks", "2"], "2 ranks need a GPU each, and there are 0. Write --backend gloo"),
])  # fmt: skip
def test_refused_before_it_starts(run, arguments, says):
    status, printed, said = run(*arguments)
    assert status == 2 and says in said and "Traceback" not in said and "|" not in printed


def test_which_backends_for_how_many_gpus(capsys):
    assert collectives_command._backends(None, [2, 4, 6], 4) == {"gloo": [2, 4, 6], "nccl": [2, 4]}
    assert "No NCCL for [6] ranks" in capsys.readouterr().out
    assert collectives_command._backends(None, [2, 4], 4) == {"gloo": [2, 4], "nccl": [2, 4]}
    assert collectives_command._backends(["nccl"], [2], 2) == {"nccl": [2]}
    with pytest.raises(ValueError, match="there are 2. Write --ranks 2, or --backend gloo"):
        collectives_command._backends(["nccl", "gloo"], [2, 4], 2)
