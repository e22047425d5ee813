"""Steps of one model on real ranks and simulated links, split in ways of data, tensor and pipeline parallelism.

The model is eight transformer layers of width 1024, trained in bfloat16 on GPUs that compute 125 TFLOP/s. Computing
only takes time: ranks sleep. The strategies are the package's own, and all that they send travels on the link.
Processes are slower than GPUs at sending, so a measured step is stretched: all times, the link's and the computing's,
are multiplied by one factor, and messages are made smaller by another, which changes nothing but the work of moving
them.

`measure_way` splits it over two GPUs and any link, `forecast` and `measure_layout` over a cluster.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from scratch_ddp.course.pages.sleeping import SleepingBlock
from scratch_ddp.ddp import FlatDDP, OverlappedDDP
from scratch_ddp.fsdp import FSDP
from scratch_ddp.instruments.cost import Accelerator, Cluster, Layout, ModelShape, Wire, step_time
from scratch_ddp.instruments.cost.layouts import hop_wire
from scratch_ddp.instruments.cost.models import forward_flops_of_block
from scratch_ddp.instruments.network import Link, LinkedGroup, linked_group, preset
from scratch_ddp.instruments.timing import interleaved
from scratch_ddp.pipeline import Pipeline, one_f_one_b
from scratch_ddp.pipeline.schedules import Schedule
from scratch_ddp.tensor_parallel import move

LAYERS, WIDTH = 8, 1024
ELEMENT, FLOPS = 2, 125e12  # bytes of a number in bfloat16; operations that a GPU does in a second
PARAMETERS = 12 * WIDTH**2  # of a layer: 4 matrices of the attention, 8 of the MLP
_SMALLER = 1 / 512  # messages
_NUMBERS = ELEMENT / 4 * _SMALLER  # what is really sent are so many float32 for a number in bfloat16

Groups = dict[str, LinkedGroup]  # "dp", "tp" and "pp"
Step = Callable[[], object]

# Two GPUs. Attention's products of tokens with tokens are left out, so that a learner can check the times by hand.
LINKS = ("NVLink 4", "PCIe 4.0 x16", "Ethernet 100 Gb", "Ethernet 10 Gb")
TOKENS, MICRO_BATCHES = 4096, 8  # of a step
FORWARD = 2 * PARAMETERS * TOKENS / FLOPS  # seconds of a layer, on one GPU; a backward takes twice as long
ALONE = 3 * LAYERS * FORWARD  # seconds of a step on one GPU
GRADIENTS = PARAMETERS * ELEMENT  # bytes of a layer's
ACTIVATIONS = TOKENS * WIDTH * ELEMENT  # bytes between two layers
WAYS = {"DP": Layout(2), "TP": Layout(1, 2), "PP": Layout(1, 1, 2, micro_batches=MICRO_BATCHES)}
WAYS["PP, 2 more"] = WAYS["PP"]  # forwards under way on rank 0: a reserve for messages that take long
SCHEDULES = {"PP": one_f_one_b(2, MICRO_BATCHES), "PP, 2 more": one_f_one_b(2, MICRO_BATCHES, ahead=3)}

# A cluster.
SHAPE = ModelShape(
    "eight blocks", LAYERS, WIDTH, 4 * WIDTH, heads=16, kv_heads=16, head_width=64, mlp_matrices=2, norm_vectors=0
)
SEQUENCE = 512  # tokens
DEVICE = Accelerator("a GPU", FLOPS, 16e9)
NEAR, FAR = Link(8.4e-6, 1e-9 / 64, per_round=3.4e-6), Link(8.4e-6, 1e-9 / 6.25, per_round=14e-6)
CLUSTER = Cluster(DEVICE, 2, NEAR, FAR)  # nodes of two: PCIe 5.0 x16 in a node, one card of 100 Gb/s for both


def measure_way(way: str, link: str, forecast: float, group: LinkedGroup, seconds: float) -> float:
    """A step of two GPUs, split in this way on this link: seconds of the slower rank, not stretched.

    `group`: two ranks, which get the link; both call it. `seconds`: how long a step with this forecast takes here.
    """
    slower = seconds / forecast
    group.link = _stretched(preset(link), slower)
    return _measure(step_of_way(way, group, slower)) / slower


def step_of_way(way: str, group: LinkedGroup, slower: float) -> Step:
    """A step of two GPUs, with every time multiplied by `slower`. Its tensor parallelism sends whole activations."""
    layout, tokens = WAYS[way], TOKENS // (WAYS[way].dp * WAYS[way].micro_batches)
    forward = slower * FORWARD * tokens / TOKENS
    groups = dict.fromkeys(("dp", "tp", "pp"), group)
    return _step(layout, tokens, forward, groups, ("copy", "reduce"), SCHEDULES.get(way))


def forecast(layout: Layout) -> float:
    """Seconds of a step on the cluster by the formulas, where devices reach their peak."""
    return step_time(SHAPE, layout, CLUSTER, SEQUENCE, efficiency=1.0).total


def measure_layout(layout: Layout, seconds: float) -> float:
    """Seconds of a step of the slowest rank, not stretched. Every rank calls it; they are layout.devices.

    `seconds`: how long it takes here. Tensor parallelism slices tokens between its layers. Without a pipeline there is
    one micro-batch; sharding is ZeRO-3 or none.
    """
    slower = seconds / forecast(layout)
    mesh = init_device_mesh("cpu", (layout.dp, layout.pp, layout.tp), mesh_dim_names=("dp", "pp", "tp"))
    wires = {"dp": CLUSTER.wire(layout.dp, layout.tp * layout.pp), "tp": CLUSTER.wire(layout.tp)}  # dp's far apart
    wires["pp"] = hop_wire(layout, CLUSTER)
    links = {name: _stretched(_as_link(wire), slower) for name, wire in wires.items()}
    groups = {name: linked_group(link, mesh[name].get_group()) for name, link in links.items()}
    tokens = layout.micro * SEQUENCE
    forward = slower * tokens * forward_flops_of_block(SHAPE, SEQUENCE) / FLOPS
    taken = _measure(_step(layout, tokens, forward, groups, ("gather", "reduce_scatter")))
    for group in groups.values():
        dist.destroy_process_group(group)
    return taken / slower


def _as_link(wire: Wire) -> Link:
    """A link of each rank's own on which an all-gather takes as long as on this wire."""
    rounds = max(1, wire.world_size - 1)
    one = wire.all_gather(0) if wire.world_size > 1 else 0.0
    return Link(wire.inside.alpha, wire.beta, per_round=max(0.0, one - wire.inside.alpha) / rounds)


def _stretched(link: Link, slower: float) -> Link:
    return Link(link.alpha * slower, link.beta * slower / _SMALLER, per_round=link.per_round * slower)


def _part(elements: int, forward: float, moves: tuple[str, str] | tuple[None, None], group: LinkedGroup) -> nn.Module:
    """A layer, or its attention or MLP, of which each rank of `group` has a part: activations come and go by `moves`.

    `forward`: its seconds; a backward takes twice as long.
    """
    block, (arrive, leave) = SleepingBlock(elements, forward, 2 * forward), moves
    block.register_forward_pre_hook(lambda _, args: (move(args[0], arrive, group, -1),))
    block.register_forward_hook(lambda _, args, output: move(output, leave, group, -1))
    return block


def _step(
    layout: Layout, tokens: int, forward: float, groups: Groups, moves: tuple[str, str], rows: Schedule | None = None
) -> Step:
    """A step whose micro-batches have so many tokens; `forward`: seconds of a whole layer for one of them."""
    m, parts = layout.micro_batches, 2 if layout.tp > 1 else 1
    elements, seconds = round(PARAMETERS / layout.tp / parts * _NUMBERS), forward / layout.tp / parts
    inside = moves if layout.tp > 1 else (None, None)
    part = partial(_part, elements, seconds, inside, groups["tp"])
    layers = [nn.Sequential(*(part() for _ in range(parts))) for _ in range(LAYERS)]
    slices = layout.tp if moves[0] == "gather" else 1
    x = torch.zeros(m, round(tokens * WIDTH / slices * _NUMBERS), requires_grad=True)
    if layout.pp > 1:
        cuts = list(range(0, LAYERS, LAYERS // layout.pp))[1:]
        rows = rows or one_f_one_b(layout.pp, m)
        model = replica = Pipeline(layers, m, rows, lambda output, _: output.mean(), groups["pp"], cuts=cuts)
        if layout.dp > 1:
            replica = FlatDDP(model.local_module, group=groups["dp"])
    else:
        model = replica = nn.Sequential(*layers)
        if layout.dp > 1 and layout.stage == "ZeRO-3":
            model = replica = FSDP(model, groups["dp"], units=layers)
        elif layout.dp > 1:
            model = replica = OverlappedDDP(model, group=groups["dp"])

    def step() -> None:
        if layout.pp > 1:
            model.step(x.detach(), torch.zeros(m))
        else:
            model(x).sum().backward()
        if layout.dp > 1:
            replica.sync_gradients()
        model.zero_grad()

    return step


def _measure(step: Step) -> float:
    """Seconds of the rank that takes longest, in the second of two steps: the first agrees on sizes, makes buffers."""
    return interleaved({"step": step}, rounds=1, warm_up=1)["step"][0].wall
