"""Carry out a schedule: each rank runs its row of actions, receives what they need and sends what they give.

If an action fails, its rank goes on exchanging messages without computing, so that no other rank waits for ever. At the
end every rank raises.
"""

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from scratch_ddp.common.agreement import raise_everywhere
from scratch_ddp.common.replicas import dtype_and_shape
from scratch_ddp.pipeline.halves import backward_of_inputs, compute_weight_gradients, weights_put_off
from scratch_ddp.pipeline.messages import DTYPES, MOST_DIMENSIONS, Messages, Sizes
from scratch_ddp.pipeline.schedules import Action, Row, Schedule

_NAMES = {"F": "forward", "B": "backward", "I": "backward", "W": "weights' backward"}


def execute(
    schedule: Schedule,
    stages: Mapping[int, Callable[[torch.Tensor], torch.Tensor]],
    inputs: Sequence[torch.Tensor],
    loss: Callable[[int, torch.Tensor], torch.Tensor],
    sizes: Sizes | None = None,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str = "cpu",
) -> tuple[float, list[tuple[Action, float, float]]]:
    """Carry out this rank's row of a valid schedule. Return its loss, and (action, start, end) of time.monotonic.

    stages: this rank's, by number; a stage takes a tensor and returns one, of floating-point numbers. inputs: the
    micro-batches, on the rank of stage 0. loss: called on the rank of the last stage with a micro-batch's number and
    output, returns its share of the loss. Gradients are added to `.grad`; under no_grad there are none. sizes: one dict
    for several passes over inputs of the same sizes: the first one fills it, later ones need no headers. device: where
    the stages are.

    Raises RuntimeError on every rank if an action fails on any; some gradients have then been added. Cost: a message
    for each output and gradient that a stage on another rank needs, a header of 80 bytes before each output while
    `sizes` is empty, and one all-reduce of 24 bytes.
    """
    row, sizes, spans = schedule[dist.get_rank(group)], {} if sizes is None else sizes, []
    messages = Messages(schedule, sizes, group, torch.device(device))
    computing = _Computing(stages, inputs, loss, sizes, messages.last, row)
    problem = cause = None
    for action in row:
        result, arrived = None, messages.take(action)
        start = time.monotonic()
        if problem is None and not messages.lost:
            try:
                result = computing.run(action, arrived)
            except Exception as error:
                where = f"stage {action.stage} failed in the {_NAMES[action.kind]} of micro-batch {action.micro}"
                cause, problem = error, f"{where}: {type(error).__name__}: {error}"
            spans.append((action, start, time.monotonic()))
        messages.give(action, result)
    messages.finish()
    try:
        raise_everywhere(problem, group, RuntimeError)
    except RuntimeError as everyones:
        sizes.clear()
        raise everyones from cause
    return float(computing.loss), spans


class _Computing:
    """What this rank's actions compute in one pass. `graphs` holds what a backward needs: an activation is alive."""

    def __init__(self, stages: Mapping, inputs: Sequence, loss: Callable, sizes: Sizes, last: int, row: Row):
        self.stages, self.inputs, self.loss_of, self.sizes, self.last = stages, inputs, loss, sizes, last
        self.in_halves = {action[1:] for action in row if action.kind == "W"}
        # (stage, micro-batch) -> input, its gradient, output, what is put off
        self.graphs: dict[tuple[int, int], tuple] = {}
        self.loss = torch.zeros((), dtype=torch.float64)

    def run(self, action: Action, arrived: torch.Tensor | None) -> torch.Tensor | None:
        kind, stage, micro = action
        if kind == "W":
            return compute_weight_gradients(self.graphs.pop((stage, micro))[-1])
        return (self.forward if kind == "F" else self.backward)(stage, micro, arrived)

    def forward(self, stage: int, micro: int, x: torch.Tensor | None) -> torch.Tensor:
        gradients: list[torch.Tensor] = []
        if stage == 0:
            x = self.inputs[micro]
        elif torch.is_grad_enabled():
            x = x + torch.zeros((), dtype=x.dtype, device=x.device, requires_grad=True)  # no leaf: it may be changed
            x.register_hook(gradients.append)
        later: list = []
        with weights_put_off(later) if (stage, micro) in self.in_halves else contextlib.nullcontext():
            y = self.stages[stage](x)
            if stage == self.last:
                y = self.loss_of(micro, y)
                self.loss += y.detach().cpu()
        self.graphs[stage, micro] = x, gradients, y, later
        if stage < self.last:
            self.check_size(stage, micro, y)
        return y.detach()

    def backward(self, stage: int, micro: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        x, gradients, y, later = self.graphs.pop((stage, micro))
        if (stage, micro) in self.in_halves:
            self.graphs[stage, micro] = (later,)
        if y.requires_grad and (stage, micro) in self.in_halves:
            backward_of_inputs(y, gradient, later)
        elif y.requires_grad:
            torch.autograd.backward(y, gradient)
        return gradients[0] if gradients else torch.zeros_like(x)

    def check_size(self, stage: int, micro: int, y: torch.Tensor) -> None:
        if not isinstance(y, torch.Tensor) or y.dtype not in DTYPES or y.dim() > MOST_DIMENSIONS:
            what = dtype_and_shape(y) if isinstance(y, torch.Tensor) else type(y).__name__
            most = f"with {MOST_DIMENSIONS} dimensions at most"
            raise TypeError(f"a stage must put out one tensor of floating-point numbers {most}, not {what}")
        size = self.sizes.setdefault((stage, micro), y.detach().to("meta"))
        if (now := dtype_and_shape(y)) != (before := dtype_and_shape(size)):
            raise ValueError(f"it put out {now}, and {before} before, for inputs of the same size")
