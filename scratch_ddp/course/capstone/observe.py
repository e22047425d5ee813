"""Runs a learner's script on a rank as torchrun would, and writes down what it does: `observe SCRIPT FOLDER PATIENCE`.

Written down are the rows that go through the model, in training and otherwise, and for each optimizer step this rank's
own gradients, the gradients that it steps with, and the parameters afterwards.
"""

import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from scratch_ddp.cells.processes import die_with_parent
from scratch_ddp.course.capstone.places import Watchdog
from scratch_ddp.course.capstone.torchrun import STUCK

FILE = "seen"  # FILE.rank


class Observer:
    """What one rank did: `trained` and `predicted` rows, and `steps`."""

    def __init__(self) -> None:
        self.trained: list[bytes] = []
        self.predicted: list[bytes] = []
        self.steps: list[dict[str, Any]] = []
        self._own: dict[nn.Parameter, torch.Tensor] = {}  # gradients since the last step
        self._names: dict[nn.Parameter, str] = {}
        self._depth = 0  # of modules that call modules

    def install(self) -> None:
        register_module_forward_pre_hook(self._forward)
        register_module_forward_hook(self._forward_ended, always_call=True)
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)

    def _forward(self, module: nn.Module, args: tuple) -> None:
        self._depth += 1
        if self._depth > 1 or not isinstance(module, nn.Module) or not any(True for _ in module.parameters()):
            return  # a part of a model, or a loss
        rows = [row.numpy().tobytes() for row in args[0].detach()] if args and torch.is_tensor(args[0]) else []
        (self.trained if module.training else self.predicted).extend(rows)
        for name, parameter in module.named_parameters():
            if parameter not in self._names and parameter.requires_grad:
                self._names[parameter] = name
                parameter.register_hook(lambda gradient, its=parameter: self._arrived(its, gradient))

    def _forward_ended(self, *_: Any) -> None:
        self._depth -= 1

    def _arrived(self, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        self._own[parameter] = self._own.get(parameter, 0) + gradient.detach()

    def _before_step(self, *_: Any) -> None:
        own = {name: self._own[each].clone() for each, name in self._names.items() if each in self._own}
        used = {name: each.grad.clone() for each, name in self._names.items() if each.grad is not None}
        self.steps.append({"own": own, "used": used})
        self._own.clear()

    def _after_step(self, *_: Any) -> None:
        self.steps[-1]["after"] = {name: each.detach().clone() for each, name in self._names.items()}

    def write(self, path: Path) -> None:
        torch.save({"trained": self.trained, "predicted": self.predicted, "steps": self.steps}, path)


def main(path: Path, folder: Path, patience: float) -> None:
    rank = os.environ["RANK"]
    observer, watchdog = Observer(), Watchdog(path, folder / f"{STUCK}.{rank}", patience)
    observer.install()
    write = watchdog.before_end = lambda: observer.write(folder / f"{FILE}.{rank}")
    register_optimizer_step_post_hook(lambda *_: watchdog.beat())
    sys.argv = [str(path)]
    sys.path.insert(0, str(path.parent))
    try:
        runpy.run_path(str(path), run_name="__main__")
    finally:
        write()


if __name__ == "__main__":
    die_with_parent()
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]), float(sys.argv[3]))
