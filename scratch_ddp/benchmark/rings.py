"""Our collectives beside gloo's own, on 2 ranks."""

from collections.abc import Iterator

import torch
import torch.distributed as dist

from scratch_ddp import collectives as ours
from scratch_ddp.benchmark import steps
from scratch_ddp.common.tensors import all_gather_single, reduce_scatter_single
from scratch_ddp.instruments.timing import Sample, interleaved

SIZES = (8, 64, 256)  # MiB
PAIRS = (
    ("ring_all_reduce", "all_reduce"),
    ("unchecked_ring_all_reduce", "all_reduce"),
    ("direct_reduce_scatter", "reduce_scatter"),
    ("direct_all_gather", "all_gather"),
)


def measure(rounds: int, size: int) -> dict[str, list[Sample]]:
    """On each rank: all operations at one size in bytes, in turns. Collective."""
    n = dist.get_world_size()
    # Filled, so that their pages exist: touching a page for the first time takes longer than a message.
    whole, part = torch.empty(size // 4 // n * n).fill_(0), torch.empty(size // 4 // n).fill_(0)
    parts = list(whole.chunk(n))

    def unchecked() -> None:  # torch does not compare the ranks' calls either
        with ours.unchecked():
            ours.ring_all_reduce(whole)

    operations = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "ring_all_reduce": lambda: ours.ring_all_reduce(whole),
        "unchecked_ring_all_reduce": unchecked,
        "all_gather": lambda: all_gather_single(whole, part),
        "direct_all_gather": lambda: ours.all_gather(parts, part),
        "reduce_scatter": lambda: reduce_scatter_single(part, whole),
        "direct_reduce_scatter": lambda: ours.reduce_scatter(part, parts),
    }
    return interleaved(operations, rounds)


def rows(rounds: int) -> Iterator[steps.Row]:
    for size in SIZES:
        found = steps.on_ranks(2, measure, rounds, size * 2**20)
        yield from ((f"{size} MiB: our {what}", figure) for what, figure in steps.beside(found, PAIRS))
