"""`Pipeline`: a model whose layers are spread over the ranks. All that users call."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.common.agreement import check_same_lines, compare, digest, message_device, raise_everywhere
from scratch_ddp.common.replicas import describe, named_tensors
from scratch_ddp.common.wrapper import Group, local_group, process_group
from scratch_ddp.pipeline.execute import execute
from scratch_ddp.pipeline.messages import Sizes
from scratch_ddp.pipeline.schedules import Action, Schedule, gpipe, interleaved, one_f_one_b, zb_h1
from scratch_ddp.pipeline.simulate import homes, validate
from scratch_ddp.pipeline.split import Layer, balanced_cuts, layers_of
from scratch_ddp.pipeline.tied import Tied, shared

SCHEDULES: dict[str, Callable[[int, int], Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": lambda p, m: interleaved(p, m, 2),
    "zb_h1": zb_h1,
}


class Pipeline(nn.Module):
    """A model of which each rank holds some layers; micro-batches pass from rank to rank as a schedule says.

    `layers`: the whole model, on every rank: an `nn.Sequential`, a list of modules or a transformers decoder (see
    `layers_of`). A rank keeps its own layers; drop the model to free the others.
    `n_micro`: into how many micro-batches a batch is cut along dimension 0. They may be of different sizes.
    `schedule`: "gpipe", "1f1b", "interleaved" (two stages a rank), "zb_h1", or a row of actions for each rank.
    `loss(output, target)`: the mean over the items of a micro-batch.
    `group`: a process group, a dimension of a mesh (`mesh["pp"]`), or None for the default group.
    `costs`: of each layer, such as `layer_seconds` measures; stages are cut to be alike. By default its parameters.
    `cuts`: the numbers of the layers before which to cut, in place of that.
    `ahead`: how many actions before its turn a message's receive is posted.

    `local_module` holds this rank's layers under the whole model's names; an optimizer made from `parameters()` updates
    them. A parameter that stages on several ranks hold (a tied embedding) starts as the first one's, and its gradient
    is the sum of theirs. `spans` tells what this rank did in the last pass: (action, start, end) of time.monotonic.
    Raises ValueError on every rank if the arguments don't fit on any rank, or differ. Costs three small all-reduces.
    """

    def __init__(
        self,
        layers: nn.Module | Sequence[nn.Module],
        n_micro: int,
        schedule: str | Schedule = "1f1b",
        loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = nn.functional.cross_entropy,
        group: Group = None,
        *,
        costs: Sequence[float] | None = None,
        cuts: Sequence[int] | None = None,
        ahead: int = 1,
    ):
        super().__init__()
        self.group, self.n_micro, self.loss, self.ahead = process_group(group), n_micro, loss, ahead
        problem, parts = None, []
        try:
            self.schedule = _rows(schedule, dist.get_world_size(self.group), n_micro)
            parts = _cut(layers_of(layers), 1 + max(homes(self.schedule)), costs, cuts)
            problem = _problem_with(parts, loss, ahead)
        except (TypeError, ValueError) as error:
            problem = str(error)
        raise_everywhere(problem, self.group)
        lines = [
            *_described(parts),
            f"ahead {ahead}",
            *(f"row {rank}: {list(map(str, row))}" for rank, row in enumerate(self.schedule)),
        ]
        check_same_lines(lines, "the ranks build different pipelines; do the same everywhere", self.group)
        self._wires = self.group if "cpu:" in dist.get_backend_config(self.group) else _main_memory_group(self.group)
        self._home, self._rank, self._last = homes(self.schedule), dist.get_rank(self.group), len(parts) - 1
        self._stages = {n: partial(_chain, part) for n, part in enumerate(parts) if self._home[n] == self._rank}
        self.local_module = _assembled(layer for n in sorted(self._stages) for layer in parts[n])
        self._names = set(_assembled(layer for part in parts for layer in part).state_dict())
        self._tied = Tied(shared(parts, self._home), self._wires)
        self._sizes: Sizes = {}
        self._known = 0  # a digest of the inputs that the sizes belong to
        self.spans: list[tuple[Action, float, float]] = []

    def step(self, x: torch.Tensor | None, y: torch.Tensor | None, everywhere: bool = False) -> float | None:
        """Forward and backward of a batch. Return the loss, the mean over all items, on the rank of the last stage.

        x: the inputs, needed on the rank of stage 0. y: the targets, needed on the rank of the last stage. An item is
        an entry of dimension 0. everywhere: return the loss on every rank. Gradients of the mean are added to `.grad`.

        Every rank calls it. Raises ValueError on every rank, before anything is sent, if the batch does not fit, and
        RuntimeError on every rank if a stage fails on any; all gradients are then dropped, also if it is interrupted.
        Cost: see `execute`; a small all-reduce before it; a message for each tied parameter; 8 bytes for the loss.
        """
        sizes = self._meet("step", x, y, everywhere)
        self._tied.set_aside()
        try:
            loss = self._run(self.schedule, sizes, x, y, everywhere)
            self._tied.add_up()
            return loss
        except BaseException:
            self.zero_grad()  # some micro-batches' gradients are there, others are not
            raise

    def evaluate(self, x: torch.Tensor | None, y: torch.Tensor | None, everywhere: bool = False) -> float | None:
        """Return the loss as `step` does, without a backward: no gradients, only the outputs travel."""
        sizes = self._meet("evaluate", x, y, everywhere)
        forwards = [[action for action in row if action.kind == "F"] for row in self.schedule]
        return self._run(forwards, sizes, x, y, everywhere)

    def _run(
        self, rows: Schedule, sizes: Sizes, x: torch.Tensor | None, y: torch.Tensor | None, everywhere: bool
    ) -> float | None:
        xs, ys = (() if each is None else each.tensor_split(self.n_micro) for each in (x, y))
        device = next((each.device for each in self.local_module.parameters()), torch.device("cpu"))

        def share(micro: int, output: torch.Tensor) -> torch.Tensor:
            return self.loss(output, ys[micro]) * (len(ys[micro]) / len(y))

        known, self._known = self._known, 0  # unless it comes to its end
        loss, self.spans = execute(rows, self._stages, xs, share, sizes, self._wires, self.ahead, device)
        self._known = known
        if everywhere:
            told = torch.tensor(loss, dtype=torch.float64, device=message_device(self.group))
            dist.broadcast(told, group=self.group, group_src=self._home[self._last])
            return told.item()
        return loss if self._home[self._last] == self._rank else None

    def _meet(self, what: str, x: Any, y: Any, everywhere: bool) -> Sizes:
        """Compare what the ranks are about to do. Return what is known of the sizes; nothing if they are new."""
        takes_x, takes_y = (self._home[stage] == self._rank for stage in (0, self._last))
        problem = (takes_x and _batch_problem("x", x, self.n_micro)) or (
            takes_y and _batch_problem("y", y, self.n_micro)
        )
        numbers = {"problem": bool(problem), "x": 0, "y": 0, "inputs": 0}
        if not problem and takes_x:
            inputs = digest([what, str(self.training), str(x.shape), str(x.dtype)])
            numbers |= {"x": len(x), "inputs": inputs}
        if not problem and takes_y:
            numbers |= {"y": len(y)}
        same = {"call": digest([what, str(everywhere)]), "known": self._known}
        largest, different, _ = compare(self.group, same, numbers)
        if "call" in different:
            lines = [f"{what}(…, everywhere={everywhere})"]
            check_same_lines(lines, "the ranks call different methods; do the same everywhere", self.group)
        if largest["problem"]:
            raise_everywhere(problem or None, self.group)
        if largest["x"] != largest["y"]:
            raise ValueError(
                f"x has {largest['x']} items and y {largest['y']}: an item's input and target belong together"
            )
        if "known" in different or self._known != largest["inputs"]:
            self._sizes.clear()
        self._known = largest["inputs"]
        return self._sizes

    def state_dict(self, *, destination: dict[str, Any] | None = None, prefix: str = "", **_: Any) -> dict[str, Any]:
        """Return this rank's part of the whole model's state dict, under its names. No communication."""
        destination = {} if destination is None else destination
        return self.local_module.state_dict(destination=destination, prefix=prefix)

    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Load this rank's part of a state dict that may be the whole model's. Every rank calls it.

        Raises ValueError on every rank, before anything is loaded, if a name is missing on any or belongs to no part of
        the model, or if a shape differs. Costs one all-reduce of a byte.
        """
        mine = self.local_module.state_dict()
        unknown, missing = sorted(set(state_dict) - self._names), sorted(set(mine) - set(state_dict))
        wrong = [name for name in mine if name in state_dict and state_dict[name].shape != mine[name].shape]
        problem = None
        for names, what in (
            (missing, "is missing"),
            (unknown, "is not part of the model"),
            (wrong, "has another shape"),
        ):
            if names:
                problem = f"the state dict does not fit: {names[0]!r} {what}"
        raise_everywhere(problem, self.group)
        self.local_module.load_state_dict({name: state_dict[name] for name in mine})

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters, under the whole model's names."""
        return self.local_module.named_parameters(*args, **kwargs)


class _Part(nn.Module):
    """Modules under the names that they have in the whole model."""


def _assembled(layers: Iterable[Layer]) -> _Part:
    part = _Part()
    for name, module in (pair for layer in layers for pair in layer.modules.items()):
        *path, own = name.split(".")
        place = part
        for step in path:
            if step not in place._modules:
                place.add_module(step, _Part())
            place = place._modules[step]
        place.add_module(own, module)
    return part


def _chain(layers: Sequence[Layer], x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        x = layer.call(x)
    return x


# Checks: each raises, or returns what is wrong.


def _rows(schedule: str | Schedule, p: int, m: int) -> Schedule:
    if isinstance(m, bool) or not isinstance(m, int) or m < 1:
        raise ValueError(f"n_micro must be a number of micro-batches, 1 or more, not {m!r}")
    if isinstance(schedule, str):
        if schedule not in SCHEDULES:
            raise ValueError(f"schedule must be one of {', '.join(map(repr, SCHEDULES))} or rows, not {schedule!r}")
        return SCHEDULES[schedule](p, m)
    rows = _actions(schedule)
    if len(rows) != p:
        raise ValueError(f"the schedule has {len(rows)} rows, but there are {p} ranks")
    validate(rows, m)
    return rows


def _actions(schedule: Any) -> Schedule:
    try:
        rows = [list(row) for row in schedule]
    except TypeError:
        raise TypeError(f"schedule must be a name or a row of actions for each rank, not {schedule!r}") from None
    for action in (action for row in rows for action in row):
        if not (isinstance(action, tuple) and len(action) == 3 and all(isinstance(n, int) for n in action[1:])):
            raise TypeError(f"rows must hold actions (kind, stage, micro-batch), not {action!r}")
    return [[Action(*action) for action in row] for row in rows]


def _cut(
    layers: Sequence[Layer], stages: int, costs: Sequence[float] | None, cuts: Sequence[int] | None
) -> list[list[Layer]]:
    costs = [layer.numel() for layer in layers] if costs is None else list(costs)
    if len(costs) != len(layers):
        raise ValueError(f"costs has {len(costs)} numbers, but there are {len(layers)} layers")
    cuts = balanced_cuts(costs, stages) if cuts is None else list(cuts)
    ends = [0, *cuts, len(layers)]
    if len(cuts) != stages - 1 or any(end <= start for start, end in itertools.pairwise(ends)):
        raise ValueError(
            f"cuts must be {stages - 1} growing numbers from 1 to {len(layers) - 1}, to cut {len(layers)} layers into "
            f"{stages} stages, not {cuts}"
        )
    return [list(layers[start:end]) for start, end in itertools.pairwise(ends)]


def _problem_with(parts: Sequence[Sequence[Layer]], loss: object, ahead: object) -> str | None:
    if not callable(loss):
        return f"loss must be a function of output and target, not {loss!r}"
    if isinstance(ahead, bool) or not isinstance(ahead, int) or ahead < 0:
        return f"ahead must be a number of actions, 0 or more, not {ahead!r}"
    tensors = named_tensors(_assembled(layer for part in parts for layer in part))
    return next((f"{name!r} is on the meta device and has no values" for name, each in tensors if each.is_meta), None)


def _described(parts: Sequence[Sequence[Layer]]) -> list[str]:
    return [f"stage {n}: {line}" for n, part in enumerate(parts) for line in describe(_assembled(part))]


def _batch_problem(name: str, batch: Any, m: int) -> str | None:
    if not isinstance(batch, torch.Tensor) or batch.dim() == 0:
        return f"{name} must be a tensor with an entry for each item, not {batch!r:.60}"
    return f"{name} has {len(batch)} items, too few for {m} micro-batches" if len(batch) < m else None


def _main_memory_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Between GPUs too, messages go through main memory: NCCL matches them by order, which ranks do not share."""
    return local_group(group, "gloo")
