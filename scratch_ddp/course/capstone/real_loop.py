"""The real loop of `scratch_ddp.training` under torchrun with the learner's class, which loses a rank on the way.

`torchrun --nproc-per-node 2 -m scratch_ddp.course.capstone.real_loop my_ddp.py FOLDER` trains; the folder gets the
checkpoints and a log of the steps.
"""

import argparse
import os
import signal
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.cells.processes import die_with_parent
from scratch_ddp.course.capstone import torchrun
from scratch_ddp.course.capstone.own_class import load
from scratch_ddp.course.capstone.places import Watchdog
from scratch_ddp.training import Batches, seed_everything, train
from scratch_ddp.training.checkpoints import Checkpoints
from scratch_ddp.training.data import Item
from scratch_ddp.training.pairs import make_pairs
from scratch_ddp.training.step_log import StepLog, read_steps
from scratch_ddp.training.stopping import Stopped, stop_on_sigterm

ITEMS, BATCH, EPOCHS, EVERY = 64, 16, 3, 2
STEPS = EPOCHS * ITEMS // BATCH
KILL_AT = 6  # in the backward pass of this step, after 5 are done and 4 are saved
PATIENCE = 20.0  # seconds without a step
PROMISES = {
    "torchrun": "the real loop has the losses of one process, in float64",
    "interrupted": f"rank 1 is killed in the middle of step {KILL_AT}, and the job goes on from its checkpoint",
}


class Classifier(nn.Module):
    """Says of a sentence pair whether both say the same; with the outputs of a language model's classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.letters, self.score = nn.Embedding(64, 16), nn.Linear(16, 2)
        self.double()

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> SimpleNamespace:
        mask = attention_mask[..., None].to(self.score.weight.dtype)
        mean = (self.letters(input_ids) * mask).sum(1) / mask.sum(1)
        return SimpleNamespace(logits=self.score(torch.tanh(mean)))


def judge(path: Path, patience: float = PATIENCE) -> dict[str, str]:
    """Train on one process, then with the class under torchrun. Return what is wrong by criterion."""
    with tempfile.TemporaryDirectory() as alone, tempfile.TemporaryDirectory() as together:
        training(None, Path(alone))
        expected = read_steps(Path(alone) / "log")
        ended = torchrun.run(
            __spec__.name, Path(together), path, together, "--kill", "--patience", patience, restarts=1
        )
        log = Path(together) / "log"
        steps = read_steps(log) if log.exists() else {}
        was_killed = (Path(together) / "killed").exists()
    return complaints(expected, steps, was_killed, ended)


def complaints(expected: dict, steps: dict, was_killed: bool, ended: torchrun.Ended) -> dict[str, str]:
    resumed = any("resumed after step" in line for line in ended.printed)
    different = next((n for n, step in steps.items() if abs(step["loss"] - expected[n]["loss"]) > 1e-9), None)
    first = ""
    if not was_killed:
        first = ended.complaint or f"the run ended before step {KILL_AT}"
    elif different:
        first = (
            f"step {different}: loss {steps[different]['loss']:.6f}; one process has {expected[different]['loss']:.6f}"
        )
    second = ended.complaint
    if not was_killed:
        second = "the run did not come so far"
    elif not second and not resumed:
        second = "the run did not go on from its checkpoint"
    elif not second and len(steps) < STEPS:
        second = f"only {len(steps)} of {STEPS} steps were made"
    return {"torchrun": first, "interrupted": second}


def training(path: Path | None, folder: Path, kill: bool = False, watchdog: Watchdog | None = None) -> None:
    """Train with the class in the file `path`, or without one in a single process."""
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if path else (0, 1)
    seed_everything(0)
    model = Classifier()
    if kill and rank == 1:
        _die_in_backward(model, folder)
    if path:
        model = load(path).MyDDP(model)
    pairs = make_pairs({"train": ITEMS, "validation": BATCH, "test": BATCH})["train"]
    items = [
        Item([2 + ord(letter) % 62 for letter in first[:12] + second[:12]], label)
        for first, second, label in zip(pairs["sentence1"], pairs["sentence2"], pairs["label"], strict=True)
    ]
    batches = Batches(items, BATCH, 0, rank, world_size, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    after = [StepLog(folder / "log").after_step]
    with stop_on_sigterm() as stop:
        history, report = None, print if path and rank == 0 else None
        if path:
            saved = Checkpoints(folder / "saved", EVERY, model, optimizer, batches.settings(), stop, report)
            history = saved.resume()
            after += [saved.after_step, lambda *_: watchdog.beat()]
        try:
            train(
                model,
                batches,
                EPOCHS,
                optimizer=optimizer,
                report=report,
                history=history,
                after_step=lambda *step: [call(*step) for call in after],
            )
        except Stopped as stopped:
            print(stopped)


def _die_in_backward(model: nn.Module, folder: Path) -> None:
    """Let this process be killed in the backward pass of step KILL_AT, once."""
    passes = []

    def forward_ended(_: nn.Module, __: tuple, output: SimpleNamespace) -> None:
        passes.append(output)
        if len(passes) == KILL_AT and not (folder / "killed").exists():
            (folder / "killed").touch()
            output.logits.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))

    model.register_forward_hook(forward_ended)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=lambda text: Path(text).resolve(), metavar="my_ddp.py")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kill", action="store_true", help=f"kill rank 1 in step {KILL_AT}, once")
    parser.add_argument("--patience", type=float, default=PATIENCE, help="seconds without a step until a rank ends")
    options = parser.parse_args()
    die_with_parent()
    torch.set_num_threads(1)
    options.folder.mkdir(exist_ok=True)
    watchdog = Watchdog(options.path, options.folder / f"{torchrun.STUCK}.{os.environ['RANK']}", options.patience)
    dist.init_process_group("gloo")
    training(options.path, options.folder, options.kill, watchdog)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
