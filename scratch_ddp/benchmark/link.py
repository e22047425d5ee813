"""The simulated link: how long transfers take beside their stated lengths, in one process and on two ranks."""

import time
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from scratch_ddp.benchmark import steps
from scratch_ddp.instruments.forked_ranks import run_ranks
from scratch_ddp.instruments.network import Link, LinkedGroup, linked_group, lone_rank
from scratch_ddp.instruments.timing import spread_of

LENGTHS = (0.001, 0.005, 0.02, 0.05)  # seconds
BYTES = 4000  # few, so that moving them takes little time compared with the link
LATENCY = 0.0002  # seconds

Transfer = tuple[float, float, float]  # seconds: when it was called, when its wait ended, processor time of the wait


def time_transfers(group: LinkedGroup, transfers: int) -> list[list[Transfer]]:
    """On each rank: transfers of each length, one after the other."""
    tensor, found = torch.zeros(BYTES // 4), []
    for stated in LENGTHS:
        group.link = Link(LATENCY, (stated - LATENCY) / tensor.nbytes)  # each of two ranks sends all bytes
        dist.barrier(group=group)
        found.append([_time_transfer(tensor, group) for _ in range(transfers)])
    return found


def _time_transfer(tensor: torch.Tensor, group: LinkedGroup) -> Transfer:
    began = time.perf_counter()
    work = dist.all_reduce(tensor, group=group, async_op=True)
    busy = time.process_time()
    work.wait()
    return began, time.perf_counter(), time.process_time() - busy


def beside_stated(where: str, ranks: Sequence[Sequence[Sequence[Transfer]]]) -> Iterator[steps.Row]:
    """A row for each length. A transfer begins when its last rank calls it, and ends on the first."""
    for stated, *of_ranks in zip(LENGTHS, *ranks, strict=True):
        began = [max(each[0] for each in together) for together in zip(*of_ranks, strict=True)]
        ratios = [(ended - at) / stated for at, (_, ended, _) in zip(began, of_ranks[0], strict=True)]
        share = sum(busy for *_, busy in of_ranks[0]) / sum(ended - called for called, ended, _ in of_ranks[0])
        what, found = f"a transfer / (α + bytes·β), {1e3 * stated:g} ms, {where}", spread_of(ratios)
        yield what, f"{found.median:.4f} [{found.low:.4f}–{found.high:.4f}]; {share:.1%} of a core"


def rows(rounds: int) -> Iterator[steps.Row]:
    two = run_ranks(2, lambda: time_transfers(linked_group(None), rounds), timeout=60 + rounds)
    yield from beside_stated("one process", [time_transfers(lone_rank(2, None), rounds)])
    yield from beside_stated("two ranks over gloo", two)
    dist.destroy_process_group()
