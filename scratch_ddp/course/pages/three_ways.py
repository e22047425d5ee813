"""One model and two GPUs: a step under data, tensor and pipeline parallelism, forecast and measured on a link.

The model is eight transformer layers of width 1024, trained on 4096 tokens a step in bfloat16, on GPUs that compute
125 TFLOP/s. Computing only takes time: ranks sleep. The strategies are the package's own, and all that they send
travels on the simulated link. Processes are slower than GPUs at sending, so a measured step is stretched: all times,
the link's and the computing's, are multiplied by one factor, and messages are made smaller by another, which changes
nothing but the work of moving them.
"""

import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.course.pages.sleeping_model import SleepingModel, scaled
from scratch_ddp.ddp import OverlappedDDP
from scratch_ddp.instruments.cost import Backward, per_parameter, pipelined, tensor_parallel
from scratch_ddp.instruments.network import Link, LinkedGroup, preset
from scratch_ddp.instruments.network.clock import take_time
from scratch_ddp.pipeline import Action, Pipeline, one_f_one_b
from scratch_ddp.pipeline.schedules import Schedule
from scratch_ddp.tensor_parallel import move

LINKS = ("NVLink 4", "PCIe 4.0 x16", "Ethernet 100 Gb", "Ethernet 10 Gb")
RANKS = 2
LAYERS, WIDTH, TOKENS, MICRO_BATCHES = 8, 1024, 4096, 8
ELEMENT, FLOPS = 2, 125e12  # bytes of a number in bfloat16; operations that a GPU does in a second
PARAMETERS = 12 * WIDTH**2  # of a layer: 4 matrices of the attention, 8 of the MLP
FORWARD = 2 * PARAMETERS * TOKENS / FLOPS  # seconds of a layer, on one GPU
BACKWARD = 2 * FORWARD
ALONE = LAYERS * (FORWARD + BACKWARD)  # seconds of a step on one GPU
GRADIENTS = PARAMETERS * ELEMENT  # bytes of a layer's
ACTIVATIONS = TOKENS * WIDTH * ELEMENT  # bytes between two layers

_SMALLER = 1 / 512  # messages
_FLOAT = 4  # bytes of what is really sent

Step = Callable[[], object]


def more_under_way(extra: int) -> Schedule:
    """1F1B with `extra` more forwards under way on all ranks but the last: a reserve for messages that take long."""
    rows = []
    for rank, row in enumerate(one_f_one_b(RANKS, MICRO_BATCHES)):
        forwards, backwards = ([action for action in row if action.kind == kind] for kind in "FB")
        ahead = 0 if rank == RANKS - 1 else RANKS - 1 - rank + extra
        pairs: list[Action] = [action for pair in zip(forwards[ahead:], backwards, strict=False) for action in pair]
        rows.append([*forwards[:ahead], *pairs, *backwards[len(forwards) - ahead :]])
    return rows


SCHEDULES = {"PP": one_f_one_b(RANKS, MICRO_BATCHES), "PP, 2 more": more_under_way(2)}


def _timeline(slower: float = 1.0) -> Backward:
    """Data parallelism: a rank's half of the batch, and when the gradients of each layer are ready."""
    forward, backward = (slower * LAYERS * each / RANKS for each in (FORWARD, BACKWARD))
    return Backward.in_proportion([GRADIENTS] * LAYERS, backward, forward)


def forecasts(link: Link) -> dict[str, float]:
    """Seconds of a step, by the way in which the model is split."""
    wire, stage = link.wire(RANKS), LAYERS // RANKS / MICRO_BATCHES
    ways = {
        "DP": per_parameter(_timeline(), wire).step,
        "TP": tensor_parallel(ALONE / RANKS, 4 * LAYERS, ACTIVATIONS, wire),
    }
    message = ACTIVATIONS / MICRO_BATCHES
    return ways | {
        name: pipelined(rows, stage * FORWARD, stage * BACKWARD, message, wire) for name, rows in SCHEDULES.items()
    }


def measure(link: Link | str, group: LinkedGroup, rounds: int = 3, seconds: float = 1.0) -> dict[str, list[float]]:
    """Steps on this link: for each way the seconds of `rounds` steps of the slower rank, not stretched.

    `group`: two ranks, whose link is changed; every rank calls it alike. `seconds`: how long a step shall take, which
    sets the factor by which it is stretched.
    """
    link, taken = preset(link) if isinstance(link, str) else link, {}
    for name, forecast in forecasts(link).items():
        slower = seconds / forecast
        group.link = Link(link.alpha * slower, link.beta * slower / _SMALLER, link.name, "", link.per_round * slower)
        step = _step_of(name, group, slower)
        step()  # agrees on sizes, makes buffers
        taken[name] = [_time(step, group) / slower for _ in range(rounds)]
    group.link = None
    return taken


def _step_of(name: str, group: LinkedGroup, slower: float) -> Step:
    """A step of one way, with every time multiplied by `slower`."""
    forward, backward = slower * FORWARD, slower * BACKWARD
    if name == "DP":
        replica = OverlappedDDP(SleepingModel(scaled(_timeline(slower), _SMALLER), gpu=True), group=group)
        return partial(_data_parallel_step, replica)
    if name == "TP":
        halves = nn.Sequential(*(_HalfLayer(forward / 4, backward / 4, group) for _ in range(2 * LAYERS)))
        return lambda: halves(_message(1)).sum().backward()
    layers = [_Layer(forward / MICRO_BATCHES, backward / MICRO_BATCHES) for _ in range(LAYERS)]
    rows, cuts = SCHEDULES[name], [LAYERS // RANKS]
    model = Pipeline(layers, MICRO_BATCHES, rows, _mean, group, cuts=cuts, ahead=2)
    x = torch.cat([_message(MICRO_BATCHES).detach()] * MICRO_BATCHES)
    return partial(model.step, x, torch.zeros(MICRO_BATCHES))


class _HalfLayer(nn.Module):
    """The attention or the MLP of a layer, one half of it on each rank: its input copied, its outputs summed."""

    def __init__(self, forward: float, backward: float, group: LinkedGroup):
        super().__init__()
        self.seconds, self.group = (forward, backward), group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return move(take_time(move(x, "copy", self.group), *self.seconds), "reduce", self.group)


class _Layer(nn.Module):
    """A layer whose computing takes time, for one micro-batch."""

    def __init__(self, forward: float, backward: float):
        super().__init__()
        self.seconds, self.weight = (forward, backward), nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return take_time(x * self.weight, *self.seconds)


def _message(parts: int) -> torch.Tensor:
    """As many numbers as fit into the activations of one of `parts` micro-batches."""
    return torch.zeros(1, round(ACTIVATIONS / parts * _SMALLER / _FLOAT), requires_grad=True)


def _mean(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output.mean()


def _data_parallel_step(model: OverlappedDDP) -> None:
    model().backward()
    model.sync_gradients()


def _time(step: Step, group: LinkedGroup) -> float:
    """Seconds of the rank that takes longer."""
    dist.barrier(group=group.below)
    began = time.perf_counter()
    step()
    took = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
    dist.all_reduce(took, dist.ReduceOp.MAX, group=group.below)
    group.transfers.clear()
    return took.item()
