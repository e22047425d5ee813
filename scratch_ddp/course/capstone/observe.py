"""Runs a learner's script on a rank and writes down what it does: `observe SCRIPT FOLDER`.

Written down are the rows that go through the model, in training and otherwise, and for each optimizer step this rank's
own gradients and those that it steps with.
"""

import datetime
import functools
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from scratch_ddp.course.capstone.torchrun import TIMEOUT, says_where

MODEL = "TwoExperts"  # its class in the script


class Observer:
    """What one rank did: `trained` and `predicted` rows, and `steps`."""

    def __init__(self) -> None:
        self.trained: list[bytes] = []
        self.predicted: list[bytes] = []
        self.steps: list[dict[str, dict[str, torch.Tensor]]] = []
        self._own: dict[str, torch.Tensor] = {}  # gradients since the last step
        self._parameters: dict[str, nn.Parameter] = {}
        register_module_forward_pre_hook(self._forward)
        register_optimizer_step_pre_hook(self._before_step)

    def _forward(self, module: nn.Module, args: tuple) -> None:
        if type(module).__name__ != MODEL:
            return  # a part of it, or a wrapper
        (self.trained if module.training else self.predicted).extend(row.numpy().tobytes() for row in args[0].detach())
        if not self._parameters:
            self._parameters = dict(module.named_parameters())
            for name, parameter in self._parameters.items():
                parameter.register_hook(functools.partial(self._arrived, name))

    def _arrived(self, name: str, gradient: torch.Tensor) -> None:
        self._own[name] = self._own.get(name, 0) + gradient.detach()

    def _before_step(self, *_: Any) -> None:
        used = {name: each.grad.clone() for name, each in self._parameters.items() if each.grad is not None}
        self.steps.append({"own": self._own, "used": used})
        self._own = {}


def main(path: Path, folder: Path) -> None:
    """Run the script; a collective waits for TIMEOUT seconds. What was seen is in the file `folder`/seen.RANK."""
    observer = Observer()
    limit = datetime.timedelta(seconds=TIMEOUT)
    init = dist.init_process_group
    dist.init_process_group = lambda *args, **options: init(*args, **options | {"timeout": limit})
    sys.argv = [str(path)]
    with says_where(path):
        try:
            runpy.run_path(str(path), run_name="__main__")
        finally:
            seen = {"trained": observer.trained, "predicted": observer.predicted, "steps": observer.steps}
            torch.save(seen, folder / f"seen.{os.environ['RANK']}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
