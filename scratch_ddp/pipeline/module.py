"""`Pipeline`: a model whose layers are spread over the ranks. All that users call."""

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.common.accounting import set_up
from scratch_ddp.common.agreement import compare, digest, message_device, raise_everywhere, together
from scratch_ddp.common.replicas import describe
from scratch_ddp.common.wrapper import Group, process_group
from scratch_ddp.pipeline.execute import execute
from scratch_ddp.pipeline.messages import Sizes
from scratch_ddp.pipeline.schedules import Action, Schedule, gpipe, interleaved, one_f_one_b, zb_h1
from scratch_ddp.pipeline.simulate import homes, validate
from scratch_ddp.pipeline.split import Layer, balanced_cuts, layers_of

SCHEDULES: dict[str, Callable[[int, int], Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": lambda p, m: interleaved(p, m, 2),
    "zb_h1": zb_h1,
}
_TIED = 1 << 20  # the tag of tied parameters' messages, apart from those of a schedule


def counted(target: torch.Tensor) -> int:
    """How many numbers a loss takes the mean over: integers are labels, of which -100 is left out by default."""
    return target.numel() if target.is_floating_point() else int((target != -100).sum())


class Pipeline(nn.Module):
    """A model of which each rank holds some layers; micro-batches pass from rank to rank as a schedule says.

    `layers`: the whole model, on every rank: an `nn.Sequential`, a list of modules or a transformers decoder (see
    `layers_of`). A rank keeps its own layers; drop the model to free the others.
    `n_micro`: into how many micro-batches a batch is cut along dimension 0. They may be of different sizes. A layer
    sees one at a time: BatchNorm computes other statistics than of the batch.
    `schedule`: "gpipe", "1f1b", "interleaved" (two stages a rank), "zb_h1", or a row of actions for each rank.
    `loss(output, target)`: a mean over a micro-batch; `count(target)`: over how many, by default all numbers of the
    target without labels of -100. A loss that leaves out others needs its own `count`, or it is weighted wrongly.
    `group`: a process group, a dimension of a mesh (`mesh["pp"]`), or None for the default group.
    `cuts`: the numbers of the layers before which to cut; by default stages have about equally many parameters.

    `local_module` holds this rank's layers; parameters and `state_dict()` are its own, under the whole model's names. A
    parameter that stages on several ranks hold (a tied embedding) starts as the first one's, and its gradient
    is the sum of theirs. Messages go through main memory, for which the group needs a backend: "cpu:gloo,cuda:nccl".
    Raises ValueError on every rank if the arguments don't fit on any rank, or differ. Costs one small all-reduce.
    """

    def __init__(
        self,
        layers: nn.Module | Sequence[nn.Module],
        n_micro: int,
        schedule: str | Schedule = "1f1b",
        loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = nn.functional.cross_entropy,
        group: Group = None,
        *,
        cuts: Sequence[int] | None = None,
        count: Callable[[torch.Tensor], int] = counted,
    ):
        super().__init__()
        self.group, self.n_micro, self.count = process_group(group), n_micro, count
        with together(self.group, complaint="the ranks build different pipelines; do the same everywhere") as lines:
            if "cpu:" not in dist.get_backend_config(self.group):
                raise ValueError("messages go through main memory: call dist.init_process_group('cpu:gloo,cuda:nccl')")
            if n_micro < 1:
                raise ValueError(f"n_micro is a number of micro-batches, 1 or more, not {n_micro}")
            self.schedule = _rows(schedule, dist.get_world_size(self.group), n_micro)
            parts = _cut(layers_of(layers), 1 + max(homes(self.schedule)), cuts)
            lines += [f"stage {n}: {line}" for n, part in enumerate(parts) for line in describe(_assembled(part))]
            lines += [f"row {rank}: {list(map(str, row))}" for rank, row in enumerate(self.schedule)]
        self._home, self._rank, self._last = homes(self.schedule), dist.get_rank(self.group), len(parts) - 1
        self._stages = {n: partial(_chain, part) for n, part in enumerate(parts) if self._home[n] == self._rank}
        local = _assembled(layer for n in sorted(self._stages) for layer in parts[n])
        # Its children are this rank's layers, and not the loss: so all names are the whole model's.
        self.__dict__ |= {"local_module": local, "_modules": local._modules, "loss": loss}
        self._tied = [(each, ranks) for each, ranks in _shared(parts, self._home) if self._rank in ranks]
        with set_up(), torch.no_grad():
            for parameter, ranks in self._tied:
                parameter.copy_(self._exchange(parameter, ranks)[0])
        self._sizes: Sizes = {}
        self._known = 0  # a digest of the inputs that they belong to

    def step(self, x: torch.Tensor | None, y: torch.Tensor | None, everywhere: bool = False) -> float | None:
        """Forward and backward of a batch. Return the loss, the mean over the batch, on the rank of the last stage.

        x: the inputs, needed on the rank of stage 0. y: the targets, needed on the rank of the last stage. An item is
        an entry of dimension 0. everywhere: return the loss on every rank. Gradients of the mean are added to `.grad`;
        under `torch.no_grad()` there are none, to evaluate, and only the outputs travel.

        Every rank calls it. Raises ValueError on every rank, before anything is sent, if the batch does not fit, and
        RuntimeError on every rank if a stage fails on any; all gradients are then dropped, also if it is interrupted.
        Cost: see `execute`; a small all-reduce before it; for each tied parameter a message of its size to each other
        rank that holds it; 8 bytes for the loss.
        """
        inputs = self._meet(x, y)
        tied = [each for each in self._tied if each[0].requires_grad and torch.is_grad_enabled()]
        earlier = [parameter.grad for parameter, _ in tied]  # sums already
        for parameter, _ in tied:
            parameter.grad = None
        try:
            loss = self._run(x, y)
            self._known = inputs  # now that it has come to its end
            for (parameter, ranks), before in zip(tied, earlier, strict=True):
                mine = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                total = sum(self._exchange(mine, ranks))  # in the same order on each rank
                parameter.grad = total if before is None else before + total
            if everywhere:
                told = torch.tensor(loss, dtype=torch.float64, device=message_device(self.group))
                dist.broadcast(told, group=self.group, group_src=self._home[self._last])
                loss = told.item()
        except BaseException:
            if torch.is_grad_enabled():
                self.zero_grad()  # some micro-batches' gradients are there, others are not
            raise
        return loss if everywhere or self._home[self._last] == self._rank else None

    def _run(self, x: torch.Tensor | None, y: torch.Tensor | None) -> float:
        first, last = (self._home[stage] == self._rank for stage in (0, self._last))
        xs, ys = (each.tensor_split(self.n_micro) if here else () for each, here in ((x, first), (y, last)))
        device = next((each.device for each in self.local_module.parameters()), torch.device("cpu"))
        counts_of = functools.cache(lambda: [self.count(each) for each in ys])

        def share(micro: int, output: torch.Tensor) -> torch.Tensor:
            counts = counts_of()  # here, as the stage fails if it raises
            if sum(counts) and not counts[micro]:
                return 0 * output.sum()  # a mean over nothing would be NaN
            return self.loss(output, ys[micro]) * (counts[micro] / (sum(counts) or 1))

        rows = [[each for each in row if each.kind == "F" or torch.is_grad_enabled()] for row in self.schedule]
        return execute(rows, self._stages, xs, share, self._sizes, self.group, device)[0]

    def _meet(self, x: Any, y: Any) -> int:
        """Compare the batches of the ranks; forget sizes that are of other inputs. Return the inputs' digest."""
        problem, numbers = None, {"x": 0, "y": 0, "inputs": 0}
        for name, batch, stage in (("x", x, 0), ("y", y, self._last)):
            if self._home[stage] != self._rank:
                continue
            if isinstance(batch, torch.Tensor) and batch.dim() and len(batch) >= self.n_micro:
                numbers[name] = len(batch)
            else:
                problem = f"{name} must be a tensor of at least {self.n_micro} items"
        if numbers["x"]:
            passes = (torch.is_grad_enabled(), self.training)  # stages may put out other sizes in evaluation
            numbers["inputs"] = digest([str(each) for each in (*passes, x.shape, x.dtype)])
        same = {"known": self._known, "grad": torch.is_grad_enabled()}
        largest, different, _ = compare(self.group, same, numbers | {"problem": problem is not None})
        if largest["problem"]:
            raise_everywhere(problem, self.group)
        if "grad" in different:
            raise ValueError("some ranks call step() under no_grad, others do not")
        if largest["x"] != largest["y"]:
            items = f"x has {largest['x']} items and y {largest['y']}"
            raise ValueError(f"{items}: an item's input and target belong together")
        if "known" in different or self._known != largest["inputs"]:
            self._sizes.clear()
        self._known = 0
        return largest["inputs"]

    def _exchange(self, tensor: torch.Tensor, ranks: Sequence[int]) -> list[torch.Tensor]:
        """The tensor of each of these ranks, in their order; this rank is one of them."""
        mine = tensor.detach().contiguous().cpu()
        every = {rank: mine if rank == self._rank else torch.empty_like(mine) for rank in ranks}
        others = [rank for rank in ranks if rank != self._rank]
        works = [dist.isend(mine, group=self.group, group_dst=rank, tag=_TIED) for rank in others]
        works += [dist.irecv(every[rank], group=self.group, group_src=rank, tag=_TIED) for rank in others]
        for work in works:
            work.wait()
        return [each.to(tensor.device) for each in every.values()]

    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Load this rank's part of a state dict that may be the whole model's. Every rank calls it.

        Raises ValueError on every rank if a name is missing on any, or if a shape differs.
        """
        mine = self.local_module.state_dict()
        fits = {name: name in state_dict and state_dict[name].shape == each.shape for name, each in mine.items()}
        wrong = [f"{name!r} is missing or has another shape" for name in mine if not fits[name]]
        raise_everywhere(f"the state dict does not fit: {wrong[0]}" if wrong else None, self.group)
        self.local_module.load_state_dict({name: state_dict[name] for name in mine})


def _assembled(layers: Iterable[Layer]) -> nn.Module:
    """Their modules, under the names that they have in the whole model."""
    part = nn.Module()
    for name, module in (pair for layer in layers for pair in layer.modules.items()):
        *path, own = name.split(".")
        place = part
        for step in path:
            place = place._modules.setdefault(step, nn.Module())
        place.add_module(own, module)
    return part


def _chain(layers: Sequence[Layer], x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        x = layer.call(x)
    return x


def _rows(schedule: str | Schedule, p: int, m: int) -> Schedule:
    if isinstance(schedule, str):
        if schedule not in SCHEDULES:
            raise ValueError(f"schedule must be one of {', '.join(map(repr, SCHEDULES))} or rows, not {schedule!r}")
        return SCHEDULES[schedule](p, m)
    rows = [[Action(*action) for action in row] for row in schedule]
    if len(rows) != p:
        raise ValueError(f"the schedule has {len(rows)} rows, but there are {p} ranks")
    validate(rows, m)
    return rows


def _cut(layers: Sequence[Layer], stages: int, cuts: Sequence[int] | None) -> list[list[Layer]]:
    cuts = balanced_cuts([layer.numel() for layer in layers], stages) if cuts is None else list(cuts)
    parts = [list(layers[start:end]) for start, end in itertools.pairwise([0, *cuts, len(layers)])]
    if len(parts) != stages or not all(parts):
        raise ValueError(f"cuts must be {stages - 1} growing numbers from 1 to {len(layers) - 1}, not {cuts}")
    return parts


def _shared(stages: Sequence[Sequence[Layer]], home: Mapping[int, int]) -> list[tuple[nn.Parameter, list[int]]]:
    """Each parameter that several ranks hold, with these ranks in the order of their stages."""
    holders: dict[nn.Parameter, dict[int, None]] = {}
    for stage, layers in enumerate(stages):
        for each in _assembled(layers).parameters():
            holders.setdefault(each, {})[home[stage]] = None
    return [(parameter, list(ranks)) for parameter, ranks in holders.items() if len(ranks) > 1]
