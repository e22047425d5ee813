"""The training command under torchrun with the learner's class, which loses a rank on the way.

`torchrun --nproc-per-node 2 -m scratch_ddp.course.capstone.real_loop my_ddp.py FOLDER` trains; the folder gets the
checkpoints and a log of the steps.
"""

import importlib.util
import itertools
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from scratch_ddp.course.capstone import torchrun
from scratch_ddp.course.pages.light_training import light
from scratch_ddp.training import __main__ as command

STEPS = 10
KILL_AT = 6  # in the backward pass of this step, after 5 are done and 4 are saved
PROMISES = {
    "torchrun": "the real loop has the losses of one process, in float64",
    "interrupted": f"rank 1 is killed in the middle of step {KILL_AT}, and the job goes on from its checkpoint",
}


def load(path: Path) -> ModuleType:
    """The module in this file."""
    spec = importlib.util.spec_from_file_location("my_ddp", path)
    module = sys.modules["my_ddp"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def judge(path: Path) -> dict[str, str]:
    """Train on one process, then with the class under torchrun. Return what is wrong by criterion."""
    with tempfile.TemporaryDirectory() as name:
        alone, together = Path(name, "alone"), Path(name, "together")
        reference = subprocess.Popen([sys.executable, "-m", __spec__.name, "-", alone], stdout=subprocess.DEVNULL)
        wrong, printed = torchrun.run(__spec__.name, path, together, "--kill", restarts=1)
        reference.wait()
        log = together / "log"
        steps = command.read_steps(log) if log.exists() else {}
        return complaints(command.read_steps(alone / "log"), steps, (together / "killed").exists(), wrong, printed)


def complaints(expected: dict, steps: dict, was_killed: bool, wrong: str, printed: list[str]) -> dict[str, str]:
    """What is wrong by criterion. expected, steps: lines of the step logs of one process, and of the class."""
    if not was_killed:
        first = wrong or f"the run ended before step {KILL_AT}"
        return {"torchrun": first, "interrupted": "the run did not come so far"}
    losses = [(n, step["loss"], expected[n]["loss"]) for n, step in steps.items()]
    far = (each for each in losses if abs(each[1] - each[2]) > 1e-9)
    first = next(("step {}: loss {:.6f}; one process has {:.6f}".format(*each) for each in far), "")
    if not any("resumed after step" in line for line in printed):
        wrong = wrong or "the run did not go on from its checkpoint"
    if len(steps) < STEPS:
        wrong = wrong or f"only {len(steps)} of {STEPS} steps were made"
    return {"torchrun": first, "interrupted": wrong}


def main(path: str, folder: Path, kill: bool) -> None:
    """Train with the class in the file `path`, or without one ("-") in this process alone."""
    folder.mkdir(exist_ok=True)
    light()
    if path != "-":
        own = load(Path(path).resolve()).MyDDP
        command.WRAPPERS["simple"] = own
        if kill and os.environ["RANK"] == "1" and not (folder / "killed").exists():
            _kill_in_backward(own, folder)
    sys.argv[1:] = ["--device=cpu", "--dtype=float64", "--lr=0.02", "--epochs=1", "--every=2", "--strategy=simple"]
    sys.argv += [f"--checkpoints={folder}/saved", f"--step-log={folder}/log", f"--timeout={torchrun.TIMEOUT}"]
    with torchrun.says_where(Path(path).resolve()):
        command.main()


def _kill_in_backward(own: type[nn.Module], folder: Path) -> None:
    """Let this process be killed in the backward pass of step KILL_AT."""
    passes = itertools.count(1)

    def after_forward(module: nn.Module, args: tuple, output: Any) -> None:
        if isinstance(module, own) and module.training and next(passes) == KILL_AT:
            (folder / "killed").touch()
            output.logits.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))

    register_module_forward_hook(after_forward)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), "--kill" in sys.argv[3:])
