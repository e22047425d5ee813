"""What the benchmarks of training steps refuse before any rank is started (numbers: test_options)."""

import sys

import pytest
import torch

from scratch_ddp.benchmark.__main__ import main


@pytest.mark.parametrize("command", ["ddp", "fsdp"])
def test_fewer_gpus_than_ranks(monkeypatch, capsys, command):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(sys, "argv", ["benchmark", command, "--backend", "nccl"])
    assert main() == 2
    assert capsys.readouterr().err == "--backend nccl: 1 GPUs for 2 ranks\n"
