"""The training command with the learner's class, which loses a rank on the way.

`torchrun --nproc-per-node 2 -m scratch_ddp.course.capstone.real_loop my_ddp.py FOLDER` trains without losing one; the
folder gets the checkpoints and a log of the steps.
"""

import itertools
import json
import os
import runpy
import signal
import sys
import tempfile
from pathlib import Path

import torch.distributed as dist
from torch import nn

from scratch_ddp.course.capstone import ranks
from scratch_ddp.course.pages.light_training import light
from scratch_ddp.training import __main__ as command

KILL_AT = 6  # the step in which a rank is killed; the first 2 are saved for certain, the first 4 probably
PROMISES = {
    "loop": "the real loop has the losses of one process, in float64",
    "interrupted": f"rank 1 is killed in the middle of step {KILL_AT}, and the job goes on from its checkpoint",
}


def judge(path: Path) -> dict[str, str]:
    """Train on one process, then with the class until a rank is killed, then from the checkpoint on.

    Return what is wrong by criterion.
    """
    with tempfile.TemporaryDirectory() as name:
        alone, together = Path(name, "alone"), Path(name, "together")
        ranks.run(1, train, None, alone)
        ends, died = ranks.run(2, train, path, together, True)
        if was_killed := (together / "killed").exists():
            ends, died = ranks.run(2, train, path, together)
        return complaints(read_log(alone), read_log(together), was_killed, died or ranks.causes(ends))


def complaints(expected: list[dict], lines: list[dict], was_killed: bool, wrong: str) -> dict[str, str]:
    """What is wrong by criterion. expected, lines: the logs of one process, and of the class."""
    if not was_killed:
        return {"loop": wrong or f"the run ended before step {KILL_AT}", "interrupted": "the run did not come so far"}
    losses = [(line["step"], line["loss"], expected[line["step"] - 1]["loss"]) for line in lines]
    far = (each for each in losses if abs(each[1] - each[2]) > 1e-9)
    first = next(("step {}: loss {:.10f}; one process has {:.10f}".format(*each) for each in far), "")
    return {"loop": first, "interrupted": wrong}


def read_log(folder: Path) -> list[dict]:
    """The lines of the log of steps, also of those that were made twice; none if there is no log."""
    log = folder / "log"
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def train(path: Path | None, folder: Path, kill: bool = False) -> str:
    """On a rank that has a process group already: train as `main` does. Return how it ended."""
    del os.environ["RANK"]  # by which the command knows that it has to make the group
    return ranks.end_of(path or Path(__file__), lambda: main(path, folder, kill))


def main(path: Path | None, folder: Path, kill: bool = False) -> None:
    """Train with the class in this file, or without one, in one process. kill: rank 1 is killed on the way."""
    folder.mkdir(exist_ok=True)
    light()
    if path:
        command.WRAPPERS["simple"] = own = runpy.run_path(str(path))["MyDDP"]
        if kill and dist.get_rank() == 1:
            _kill_in_step(own, folder)
    sys.argv[1:] = ["--device=cpu", "--dtype=float64", "--lr=0.02", "--epochs=1", "--every=2", "--strategy=simple"]
    sys.argv += [f"--checkpoints={folder}/saved", f"--step-log={folder}/log", f"--timeout={ranks.TIMEOUT:g}"]
    command.main()


def _kill_in_step(own: type[nn.Module], folder: Path) -> None:
    """Let this process be killed in step KILL_AT, when its gradients are there: the other rank waits for them."""
    synchronise, steps = own.sync_gradients, itertools.count(1)

    def sync_gradients(self: nn.Module) -> None:
        if next(steps) == KILL_AT:
            (folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        synchronise(self)

    own.sync_gradients = sync_gradients


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]))
