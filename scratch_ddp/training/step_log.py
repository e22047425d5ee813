"""A log of a run's steps: what each step's loss was, and which items it was made of.

A run that was interrupted repeats the steps since its last checkpoint, and logs them again. So for each step the last
line counts.
"""

import json
import os
import time
from pathlib import Path

import torch.distributed as dist

from scratch_ddp.common.accounting import set_up
from scratch_ddp.common.agreement import gather_texts
from scratch_ddp.training.data import Batch
from scratch_ddp.training.loop import History


class StepLog:
    """Appends a line of JSON for each step: step, loss, items, ranks, time. The first rank writes."""

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)

    def after_step(self, window: list[Batch], history: History) -> None:
        """Write the line of the step that has just ended. Costs two all-gathers of a few bytes per item."""
        mine = [history.losses[-1], [number for batch in window for number in batch.numbers]]
        everyones = [mine]
        if dist.is_initialized():
            with set_up():
                everyones = [json.loads(text) for text in gather_texts(json.dumps(mine))]
            if dist.get_rank():
                return
        line = {
            "step": history.steps,
            "loss": sum(loss for loss, _ in everyones) / len(everyones),
            "items": sorted(number for _, numbers in everyones for number in numbers),
            "ranks": len(everyones),
            "time": time.time(),
        }
        with open(self.path, "a") as file:
            file.write(json.dumps(line) + "\n")


def read_steps(path: str | os.PathLike) -> dict[int, dict]:
    """Return {step: its last line}, in the order of the steps. A line that was cut short does not count."""
    steps = {}
    for line in Path(path).read_text().splitlines():
        try:
            step = json.loads(line)
        except ValueError:
            continue
        steps[step["step"]] = step
    return dict(sorted(steps.items()))
