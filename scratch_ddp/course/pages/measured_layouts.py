"""Steps of layouts on real ranks and simulated links: data, tensor and pipeline parallelism together.

As in `three_ways`, computing only takes time (ranks sleep), what is sent is the package's own, and a step is stretched:
all times are multiplied by one factor, and messages made smaller by another. The global batch is the same in every
layout. Tensor parallelism slices tokens between its layers (sequence parallelism).
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from scratch_ddp.course.pages.sleeping_model import SleepingBlock
from scratch_ddp.ddp import FlatDDP, OverlappedDDP
from scratch_ddp.fsdp import FSDP
from scratch_ddp.instruments.cost import Accelerator, Cluster, Layout, ModelShape, Wire, step_time
from scratch_ddp.instruments.cost.transformer.flops import forward_flops_of_block
from scratch_ddp.instruments.network import Link, LinkedGroup, linked_group
from scratch_ddp.pipeline import Pipeline
from scratch_ddp.pipeline.schedules import interleaved, one_f_one_b
from scratch_ddp.tensor_parallel import move
from scratch_ddp.tensor_parallel.moves import _all_gather_single, _reduce_scatter_single

_HEADS = {"heads": 16, "kv_heads": 16, "head_width": 64}
SHAPE = ModelShape("eight blocks", blocks=8, width=1024, inner=4096, mlp_matrices=2, norm_vectors=0, **_HEADS)
SEQUENCE, BATCH = 512, 64  # tokens, sequences
NEAR, FAR = Wire(8.4e-6, 1e-9 / 64, 1, 3.4e-6), Wire(8.4e-6, 1e-9 / 12.5, 1, 14e-6)
DEVICE = Accelerator("a GPU", 125e12, 16e9, 0.0, "as in lesson 14b")
CLUSTER = Cluster("nodes of two", DEVICE, 2, NEAR, FAR, "PCIe 5.0 x16 in a node, Ethernet of 100 Gb/s between")

_SMALLER = 1 / 512
_NUMBER = 2 / 4 * _SMALLER  # of what is really sent in float32, for a number in bfloat16


def layouts(devices: int) -> list[Layout]:
    """Every split of so many devices, with one or two numbers of micro-batches, and ways of sharding."""
    found = []
    for tp, pp in ((t, p) for t in (1, 2, 4, 8) for p in (1, 2, 4, 8) if devices % (t * p) == 0):
        dp = devices // (tp * pp)
        for m in (1, 4) if pp == 1 else (pp, 4 * pp):
            if BATCH % (dp * m):
                continue
            layout = Layout(dp, tp, pp, BATCH // (dp * m), m)
            found.append(layout)
            if pp > 1 and pp * 2 <= SHAPE.blocks and m > pp:
                found.append(replace(layout, chunks=2))
            if dp > 1 and m == pp:
                found += [replace(layout, stage=stage) for stage in ("ZeRO-2", "ZeRO-3")[: 2 if pp == 1 else 1]]
    return found


def forecast(layout: Layout) -> float:
    """Seconds of a step by the formulas, where devices reach their peak."""
    return step_time(SHAPE, layout, CLUSTER, SEQUENCE, efficiency=1.0).total


def calls(layout: Layout) -> int:
    """About how many collectives and messages a rank has in a step: each costs the processor something."""
    passed = layout.micro_batches * SHAPE.blocks // layout.pp  # blocks, by a micro-batch
    between = 4 * layout.micro_batches * layout.chunks * (layout.pp > 1)
    return 8 * passed * (layout.tp > 1) + between + 3 * SHAPE.blocks * (layout.dp > 1)


def measure(layout: Layout, rounds: int = 3, least: float = 1.5, each: float = 0.025) -> list[float]:
    """Seconds of `rounds` steps of the slowest rank, not stretched. Every rank calls it; they are layout.devices.

    A step takes `least` seconds here, or `each` for every collective and message if that is more.
    """
    slower = max(least, each * calls(layout)) / forecast(layout)
    with _groups(layout, slower) as groups:
        step = _step(layout, slower, *groups)
        step()  # agrees on sizes, makes buffers
        return [_time(step) / slower for _ in range(rounds)]


@contextlib.contextmanager
def _groups(layout: Layout, slower: float) -> Iterator[tuple[LinkedGroup, LinkedGroup, LinkedGroup]]:
    """This rank's groups for dp, tp and pp, each on its own link: tp's ranks are next to each other, dp's far apart."""
    mesh = init_device_mesh("cpu", (layout.dp, layout.pp, layout.tp), mesh_dim_names=("dp", "pp", "tp"))
    wires = {
        "dp": CLUSTER.wire(layout.dp, layout.tp * layout.pp),
        "tp": CLUSTER.wire(layout.tp),
        "pp": CLUSTER.wire(2, layout.tp),
    }
    made = []
    for name, wire in wires.items():
        link = Link(wire.alpha * slower, wire.beta * slower / _SMALLER, name, "", wire.per_round * slower)
        made.append(linked_group(link, mesh[name].get_group()))
    try:
        yield tuple(made)
    finally:
        for group in made:
            dist.destroy_process_group(group)


class _Half(nn.Module):
    """The attention or the MLP of a block, of which each rank of `group` has a part: it gathers and scatters tokens."""

    def __init__(self, elements: int, forward: float, backward: float, group: LinkedGroup):
        super().__init__()
        self.block, self.group = SleepingBlock(elements, forward, backward), group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.group.size() == 1:
            return self.block(x)
        return move(self.block(move(x, "gather", self.group, -1)), "reduce_scatter", self.group, -1)


def _blocks(layout: Layout, slower: float, tp: LinkedGroup) -> list[nn.Module]:
    tokens = layout.micro * SEQUENCE
    forward = slower * tokens * forward_flops_of_block(SHAPE, SEQUENCE) / (DEVICE.flops * layout.tp)
    elements = round(SHAPE.block / layout.tp * _NUMBER)
    halves = [_Half(elements // 2, forward / 2, forward, tp) for _ in range(2 * SHAPE.blocks)]
    return [nn.Sequential(*halves[i : i + 2]) for i in range(0, len(halves), 2)]


def _step(layout: Layout, slower: float, dp: LinkedGroup, tp: LinkedGroup, pp: LinkedGroup) -> Callable[[], None]:
    blocks, m = _blocks(layout, slower, tp), layout.micro_batches
    numbers = round(layout.micro * SEQUENCE * SHAPE.width / layout.tp * _NUMBER)
    if layout.pp > 1:
        rows = interleaved(layout.pp, m, layout.chunks) if layout.chunks > 1 else one_f_one_b(layout.pp, m)
        every = SHAPE.blocks // (layout.pp * layout.chunks)
        cuts = list(range(every, SHAPE.blocks, every))
        x = torch.zeros(m, numbers, requires_grad=True)
        pipeline = Pipeline(blocks, m, rows, lambda output, _: output.mean(), pp, cuts=cuts)
        finish = _synchroniser(pipeline.local_module, layout, dp)

        def step() -> None:
            pipeline.step(x.detach(), torch.zeros(m))
            finish()
            pipeline.zero_grad()

        return step
    model, inputs = nn.Sequential(*blocks), torch.zeros(1, numbers, requires_grad=True)
    if layout.stage == "ZeRO-3" and layout.dp > 1:
        model = FSDP(model, group=dp, units=blocks)
    elif layout.stage == "DDP" and layout.dp > 1:
        model = OverlappedDDP(model, group=dp)
    finish = _synchroniser(model, layout, dp)

    def accumulate() -> None:
        for i in range(m):
            quiet = i < m - 1 and hasattr(model, "no_sync") and layout.stage == "DDP"
            with model.no_sync() if quiet else contextlib.nullcontext():
                model(inputs).sum().backward()
        finish()
        model.zero_grad()

    return accumulate


def _synchroniser(model: nn.Module, layout: Layout, dp: LinkedGroup) -> Callable[[], None]:
    if layout.dp == 1:
        return lambda: None
    if layout.stage == "ZeRO-2":
        return lambda: _scatter_and_gather(model, dp)
    if not hasattr(model, "sync_gradients"):
        model = FlatDDP(model, group=dp)
    return model.sync_gradients


def _scatter_and_gather(model: nn.Module, group: LinkedGroup) -> None:
    """What ZeRO-2 sends: gradients to their owners, and as many weights back."""
    n = group.size()
    flat = torch.cat([parameter.grad.view(-1) for parameter in model.parameters()])
    flat = nn.functional.pad(flat, (0, -len(flat) % n))
    mine = flat.new_empty(len(flat) // n)
    _reduce_scatter_single(mine, flat, group=group)
    _all_gather_single(flat, mine, group=group)


def _time(step: Callable[[], None]) -> float:
    """Seconds of the rank that takes longest."""
    dist.barrier()
    began = time.perf_counter()
    step()
    took = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return took.item()
