"""When a run saves its state, and where it goes on when it starts again.

Checkpoints are folders `step_00000020` in the run's folder. A new one gets this name when it is complete, so a folder
of that name is complete unless a file was damaged later. Then the one before it is taken.
"""

import dataclasses
import datetime
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from scratch_ddp.common import checkpoint
from scratch_ddp.common.accounting import set_up
from scratch_ddp.common.agreement import compare, gather_texts, raise_everywhere
from scratch_ddp.training import run_state
from scratch_ddp.training.data import Batch
from scratch_ddp.training.evaluation import Score
from scratch_ddp.training.loop import History
from scratch_ddp.training.stopping import Stopped, StopRequest

KEPT = 2  # checkpoints; the older one is for the case that the newer one is damaged
PATIENCE = 5  # seconds until a new file of one host shows on another
_COMPLETE = re.compile(r"step_\d{8}")
_PARTIAL = re.compile(r"step_\d{8}\.(partial|before)")


class Checkpoints:
    """Saves a run every `every` steps and when it is asked to stop, and finds its last checkpoint.

    `settings`: by name, what decides which items a step sees and what it does with them. A checkpoint of a run with
    others is refused. `model` and `optimizer` are those of the run; `report` gets a line for what is resumed or
    skipped. A thread writes each checkpoint while training goes on. Every rank makes one. Raises ValueError on every
    rank if one can't see the files that the first rank writes to the folder. Costs two process groups of gloo, and in
    each step one all-reduce of two bytes.
    """

    def __init__(
        self,
        folder: Path,
        every: int,
        model: nn.Module,
        optimizer: Optimizer,
        settings: Mapping[str, Any],
        stop: StopRequest,
        report: Callable[[str], None] | None = None,
        timeout: datetime.timedelta | None = None,
    ):
        self.folder, self.every, self.model, self.optimizer = folder, every, model, optimizer
        self.settings = {"strategy": run_state.family(model), **settings}
        self.stop, self.report = stop, report or (lambda line: None)
        self._write: checkpoint.Write | None = None
        self._losses: list[float] = []  # of all steps so far, over all ranks
        self._control = self._messages = None
        if dist.is_initialized():  # the thread needs a group of its own, and GPUs shall not wait for our messages
            self._control, self._messages = (dist.new_group(backend="gloo", timeout=timeout) for _ in range(2))
        _check_shared(folder)

    def resume(self) -> History:
        """Load the last checkpoint that can be read, and return its history; an empty one if there is none at all.

        Every rank calls it. Raises ValueError on every rank if there are checkpoints but none can be read, or if the
        last one is of a run with other settings.
        """
        unreadable: dict[str, str] = {}
        for name in self._names():
            try:
                checkpoint.verify(self.folder / name, None)
                extra = run_state.read_extra(self.folder / name)
                self._refuse_other_settings(name, extra["settings"])
                run_state.restore(self.folder / name, self.model, self.optimizer)
            except _Unlike:
                raise
            except ValueError as error:
                unreadable[name] = str(error)
                self.report(f"{name} is skipped: {error}")
                continue
            self._put_aside(unreadable)
            self._losses = list(extra["losses"])
            scores = [Score(*values) for values in extra["scores"]]
            self.report(f"resumed after step {len(self._losses)} ({self.folder / name})")
            return History(self._losses, extra["epoch_losses"], scores)
        if unreadable:
            first = next(iter(unreadable.values()))
            raise ValueError(f"no checkpoint in {self.folder} can be read, so move it away to start anew: {first}")
        return History()

    def after_step(self, window: list[Batch], history: History) -> None:
        """Save if it is time to. Raises Stopped on every rank, after saving, if any was asked to stop."""
        stop, busy = self._agree(self.stop.asked, self._write is not None and not self._write.has_ended)
        if not busy:
            self._finish()
        if stop:
            self.save(history)
            raise Stopped(history.steps)
        if history.steps % self.every == 0:
            self._begin(history)

    def save(self, history: History) -> None:
        """Save now, unless the last checkpoint is of this step; return when it is complete. Every rank calls it."""
        if history.steps > len(self._losses) or (self._write is None and not self._names()):
            self._begin(history)
        self._finish()

    def _begin(self, history: History) -> None:
        self._finish()  # a disk that is slower than `every` steps holds the run up
        self._losses += self._over_ranks(history.losses[len(self._losses) :])
        extra = {
            "settings": self.settings,
            "losses": self._losses,
            "epoch_losses": history.epoch_losses,
            "scores": [dataclasses.astuple(score) for score in history.scores],
        }
        tensors, others = run_state.collect(self.model, self.optimizer, extra)
        folder = self.folder / f"step_{history.steps:08}"
        self._write = checkpoint.Write(folder, tensors, others, self._control, background=True, messages=self._messages)

    def _finish(self) -> None:
        if self._write is not None:
            write, self._write = self._write, None
            write.finish()
            if checkpoint.is_first(None):
                for name in _listed(self.folder, _COMPLETE)[KEPT:]:
                    shutil.rmtree(self.folder / name)

    def _names(self) -> list[str]:
        """The complete checkpoints, the last one first, as the first rank sees them. It removes what is incomplete."""
        names: list[str] = []
        if checkpoint.is_first(None):
            names = _listed(self.folder, _COMPLETE)
            for name in _listed(self.folder, _PARTIAL):
                if name.removesuffix(".before") in names or name.endswith(".partial"):
                    shutil.rmtree(self.folder / name)
        return _texts("\n".join(names))[0].split()

    def _put_aside(self, names: Iterable[str]) -> None:
        """Rename damaged checkpoints, so that they do not count among those that are kept."""
        if checkpoint.is_first(None):
            for name in names:
                shutil.rmtree(self.folder / f"{name}.damaged", ignore_errors=True)
                (self.folder / name).rename(self.folder / f"{name}.damaged")

    def _refuse_other_settings(self, name: str, settings: Mapping[str, Any]) -> None:
        for key in self.settings | settings:
            there, here = settings.get(key), self.settings.get(key)
            if there != here:
                raise _Unlike(f"{self.folder / name} is of a run with {key} {there}, but this one has {key} {here}")

    def _agree(self, *flags: bool) -> list[int]:
        """Each flag, if it is set on any rank."""
        if self._control is None:
            return list(flags)
        return compare(self._control, {}, {}, flags, torch.uint8).flags

    def _over_ranks(self, parts: list[float]) -> list[float]:
        if self._control is None:
            return parts
        means = torch.tensor(parts, dtype=torch.float64) / dist.get_world_size()
        with set_up():
            dist.all_reduce(means, group=self._control)
        return means.tolist()


class _Unlike(ValueError):
    """A checkpoint that is whole, but of another run."""


def _listed(folder: Path, pattern: re.Pattern) -> list[str]:
    return sorted((each.name for each in folder.iterdir() if pattern.fullmatch(each.name)), reverse=True)


def _texts(text: str) -> list[str]:
    with set_up():
        return gather_texts(text) if dist.is_initialized() else [text]


def _check_shared(folder: Path) -> None:
    """Make the folder. Raises ValueError on every rank unless each sees what the first rank writes to it."""
    mark, problem = f".seen_by_all_{secrets.token_hex(8)}", None
    first = checkpoint.is_first(None)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if first:
            (folder / mark).touch()
    except OSError as error:
        problem = f"{folder} can't be written: {error}"
    raise_everywhere(problem)
    mark = _texts(mark)[0]
    deadline = time.monotonic() + PATIENCE
    while not (seen := (folder / mark).exists()) and time.monotonic() < deadline:
        time.sleep(0.1)
    try:
        raise_everywhere(None if seen else f"{folder} is not the first rank's: all hosts must share the folder")
    finally:
        if first:
            (folder / mark).unlink()
