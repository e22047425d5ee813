"""How exact the simulated link is: transfers of stated lengths, and the processor that waiting for them takes."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist

from scratch_ddp.benchmark.ranks import run_ranks
from scratch_ddp.benchmark.report import Figure
from scratch_ddp.benchmark.timing import Spread, spread_of
from scratch_ddp.link import Link, LinkedGroup, linked_group, lone_rank

LENGTHS = (0.001, 0.005, 0.02, 0.05)  # seconds
_BYTES = 4000  # few, so that moving them takes no time beside the link's
_OFF, _SHARE = 0.03, 0.10  # at most: off the stated length, of a core while waiting


class Wait(NamedTuple):
    """One transfer on one rank: when it was called, when that call returned, when the wait ended; CPU of the wait."""

    began: float
    posted: float
    ended: float
    cpu: float  # seconds of the process, those of gloo's threads included


@dataclass
class Exactness:
    """Transfers of one length: how many times the stated seconds they took, and the share of a core used waiting.

    `late`: at least a quarter of the messages take longer than stated even without a link, which can't speed them up.
    """

    ratios: Spread
    share: float
    late: bool = False

    def figures(self, what: str) -> list[Figure]:
        """Both as rows of the table."""
        text = f"{self.ratios.median:.4f} [{self.ratios.low:.4f}–{self.ratios.high:.4f}]"
        exact, idle = abs(self.ratios.median - 1) <= _OFF, self.share < _SHARE
        must = "said: a quarter of the messages take longer without a link" if self.late else f"1 ± {_OFF:g}"
        return [
            Figure(f"a transfer / (α + bytes·β), {what}", must, text, exact or self.late),
            Figure(f"share of a core while waiting, {what}", f"< {100 * _SHARE:.0f} %", f"{self.share:.1%}", idle),
        ]


def exactness(stated: float, ranks: Sequence[Sequence[Wait]], without: Sequence[Wait]) -> Exactness:
    """Judge the transfers of all `ranks` by the first one's waits, by medians.

    A transfer begins when its last rank calls it. The processor's time that the same calls take `without` a link is
    that of moving the data, not of waiting.
    """
    mine, began = ranks[0], [max(each.began for each in together) for together in zip(*ranks, strict=True)]
    ratios = [(each.ended - at) / stated for each, at in zip(mine, began, strict=True)]
    cpu, moving = (median(each.cpu for each in some) for some in (mine, without))
    waited = median(each.ended - each.posted for each in mine)
    late = spread_of([each.ended - each.began for each in without]).high > stated
    return Exactness(spread_of(ratios), max(0.0, cpu - moving) / waited, late)


def waits(group: LinkedGroup, transfers: int) -> dict[float, list[Wait]]:
    """On each rank: transfers of each length, one after the other; those without a link as length 0."""
    tensor, found = torch.zeros(_BYTES // 4), {}
    for stated in (0.0, *LENGTHS):
        # Two ranks send what they sum.
        group.link = Link(0.0002, (stated - 0.0002) / tensor.nbytes) if stated else None
        dist.barrier(group=group)
        found[stated] = [_wait(tensor, group) for _ in range(transfers)]
    return found


def _wait(tensor: torch.Tensor, group: LinkedGroup) -> Wait:
    began = time.perf_counter()
    work = dist.all_reduce(tensor, group=group, async_op=True)
    posted, busy = time.perf_counter(), time.process_time()
    work.wait()
    return Wait(began, posted, time.perf_counter(), time.process_time() - busy)


def _on_ranks(transfers: int) -> dict[float, list[Wait]]:
    return waits(linked_group(None), transfers)


def figures(transfers: int) -> list[Figure]:
    """The rows on the link itself: both modes, each length by itself."""
    found = {"two ranks over gloo": run_ranks(2, _on_ranks, transfers, timeout=60 + transfers)}
    found["one process"] = [waits(lone_rank(2, None), transfers)]
    dist.destroy_process_group()
    return [
        row
        for where, ranks in found.items()
        for stated in LENGTHS
        for row in exactness(stated, [each[stated] for each in ranks], ranks[0][0.0]).figures(
            f"{1e3 * stated:g} ms, {where}"
        )
    ]
