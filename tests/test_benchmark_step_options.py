"""What the benchmarks of training steps refuse before any rank is started."""

import sys

import pytest
import torch

from scratch_ddp.benchmark.__main__ import main


@pytest.mark.parametrize("command", ["ddp", "fsdp", "zero"])
@pytest.mark.parametrize("option", ["--rounds", "--ranks"])
def test_fewer_than_one(monkeypatch, capsys, command, option):
    monkeypatch.setattr(sys, "argv", ["benchmark", command, option, "0"])
    assert main() == 2
    printed, said = capsys.readouterr()
    assert said == "--rounds and --ranks must be at least 1\n" and not printed


@pytest.mark.parametrize("command", ["ddp", "fsdp"])
def test_fewer_gpus_than_ranks(monkeypatch, capsys, command):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(sys, "argv", ["benchmark", command, "--backend", "nccl"])
    assert main() == 2
    assert capsys.readouterr().err == "--backend nccl: 1 GPUs for 2 ranks\n"
