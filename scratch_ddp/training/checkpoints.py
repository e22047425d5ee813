"""Checkpoints of a run, and SIGTERM: a run that was ended goes on where it was saved last.

torch.distributed.checkpoint writes each one, in a thread, to a folder `step_00000020` in the run's folder. The file
`.metadata` is written last: a folder without it was cut short and is passed over. What was saved fits any strategy on
any number of ranks.
"""

import json
import os
import shutil
import signal
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.nn import Module
from torch.optim import Optimizer

from scratch_ddp.common.agreement import compare, gather_texts, raise_everywhere
from scratch_ddp.training.data import print_once
from scratch_ddp.training.loop import History


class Checkpoints:
    """Saves a run every `every` steps and when SIGTERM comes, and finds its last checkpoint.

    `settings`: by name, what decides the losses: a checkpoint of a run with others is refused. Training goes on while a
    checkpoint is written. Every rank makes one, in the main thread. Raises ValueError on every rank if one does not see
    the folder, which exists. Costs two process groups of gloo, whose messages wait for others for `timeout`, and in
    each step one all-reduce of 8 bytes.
    """

    def __init__(
        self, model: Module, optimizer: Optimizer, settings: dict, folder: Path, every: int, timeout: timedelta | None
    ):
        self.optimizer, self.settings, self.folder, self.every = optimizer, settings, folder, every
        self._named = getattr(model, "module", model)  # what gives the tensors their names: the model in a wrapper
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])  # a schedule that goes on needs it; it is saved with the rest
        self._writing: Future | None = None
        self._last = 0  # the step that was saved last
        self._signals: list[int] = []
        # The step under way goes on to its end.
        signal.signal(signal.SIGTERM, lambda number, _: self._signals.append(number))
        # GPUs shall not wait for our messages, and the writing threads need their own group.
        self._group, self._threads = (dist.new_group(backend="gloo", timeout=timeout) for _ in range(2))
        missing = None if folder.exists() else f"{folder} is not the first rank's: hosts must share it"
        raise_everywhere(missing, self._group)

    def resume(self) -> History:
        """Load the last complete checkpoint and return its history; an empty one if there is none.

        Every rank calls it. Raises ValueError on every rank if that checkpoint is damaged, and names the one before it,
        or if it is of a run with other settings.
        """
        # The first rank's list: another host may see them later.
        names = gather_texts("\n".join(self._complete()), self._group)[0].splitlines()
        if not names:
            return History()
        name, *older = names
        state, place = self._state(""), self.folder / name
        try:
            dcp.load(state, checkpoint_id=place, process_group=self._group)
        except (Exception, CheckpointException) as error:
            then = f"goes on from {older[0]}" if older else "starts anew"
            why = f"{place} can't be loaded: {_cause(error)}"
            raise ValueError(f"{why}; move it away, and the same command {then}") from None
        extra = json.loads(state["extra"])
        for key, here in self.settings.items():
            if (there := extra["settings"].get(key)) != here:
                raise ValueError(f"{place} is of a run with {key} {there}, but this one has {key} {here}")
        parts = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        share = StateDictOptions(strict=False)  # of a sharded optimizer it is a part
        set_state_dict(self._named, self.optimizer, **parts, options=share)
        self._last = len(extra["losses"])
        print_once(f"resumed after step {self._last} ({self.folder})")
        return History(extra["losses"])

    def after_step(self, history: History) -> None:
        """Save if it is time to. If SIGTERM came to any rank, all of them end the process, after saving."""
        if compare(self._group, {}, {}, [len(self._signals)]).flags[0]:
            self.save(history)
            self.finish()
            print_once(f"stopped by SIGTERM after step {self._last}, saved; the same command goes on from there")
            # torchrun would start a run again that fails
            raise SystemExit(0 if "TORCHELASTIC_RUN_ID" in os.environ else 128 + signal.SIGTERM)
        if len(history.losses) % self.every == 0:
            self.save(history)

    def save(self, history: History) -> None:
        """Begin to save, unless the last checkpoint is of this step. Every rank calls it. Raises as `finish` does."""
        self.finish()  # a disk that is slower than `every` steps holds the run up
        if len(history.losses) == self._last:
            return
        self._last = len(history.losses)
        extra = json.dumps({"settings": self.settings, "losses": history.losses})
        place, state = self.folder / f"step_{self._last:08}", self._state(extra)
        self._writing = dcp.async_save(state, checkpoint_id=place, process_group=self._threads)

    def _state(self, extra: str) -> dict[str, Any]:
        """What is saved: of an FSDP model DTensors, else whole on every rank; of a sharded optimizer this rank's share.

        An optimizer that has no state yet gets one of zeros.
        """
        weights, state = get_state_dict(self._named, self.optimizer)
        # A clone, because async_save can't copy every row of FSDP's flat shards.
        return {"model": {name: each.clone() for name, each in weights.items()}, "optimizer": state, "extra": extra}

    def finish(self) -> None:
        """Wait until it is complete, and remove all but two. Raises OSError on every rank if it can't be written."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        try:
            writing.result()
        except (Exception, CheckpointException) as error:
            last = ", ".join(self._complete()[:1]) or "none"
            raise OSError(f"{self.folder} can't be written: {_cause(error)}; last complete: {last}") from None
        if dist.get_rank() == 0:
            oldest = self._complete()[:2][-1]  # the older one is for the case that the newer one is damaged
            for place in self.folder.glob("step_*"):
                if place.name < oldest:
                    shutil.rmtree(place)

    def _complete(self) -> list[str]:
        """The complete checkpoints, the last one first."""
        return sorted((place.parent.name for place in self.folder.glob("step_*/.metadata")), reverse=True)


def _cause(error: BaseException) -> str:
    """The last line of a failure, which says the cause on one of the ranks."""
    return f"{type(error).__name__}: {error}".strip().splitlines()[-1]
