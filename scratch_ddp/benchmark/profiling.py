"""Profiles: do the parts of a breakdown add up to the step, and is a planted fault named from the profile alone?"""

import argparse
import contextlib
import sys
import time
from dataclasses import dataclass

import torch.distributed as dist

from scratch_ddp.benchmark.command import TableRow, positive_count, report
from scratch_ddp.benchmark.rank_cells.processes import busy_cores
from scratch_ddp.course.lessons.lesson_12 import culprit
from scratch_ddp.course.pages.planted_faults import FAULTS, STRAGGLER, WITH_A_RANK, Job, in_seconds, profile, train
from scratch_ddp.instruments.forked_ranks import run_ranks
from scratch_ddp.instruments.network import linked_group
from scratch_ddp.instruments.timeline.breakdown import collectives
from scratch_ddp.instruments.timing import machine

RANKS, STEPS = 4, 6


@dataclass
class Found:
    """What one run found. `ratios`: of a rank's parts and the step by its own clock, one per step."""

    named: bool
    straggler: bool
    ratios: list[float]


def run_all(runs: int) -> list[list[Found]]:
    """On each rank: for each run and fault, what its profile says. Collective. The rank with the fault changes."""
    group = linked_group(None)
    found = []
    for run in range(runs):
        at = run % RANKS
        found.append([_found(Job(group, fault, at), fault, at) for fault in FAULTS])
    return found


def _found(job: Job, fault: str, at: int) -> Found:
    clock: list[float] = []

    def timed(job: Job) -> None:
        began = time.perf_counter()
        train(job)
        clock.append(time.perf_counter() - began)

    timelines, steps = profile(job, STEPS, timed)
    mine = [step[dist.get_rank()].seconds() for step in steps]
    waited = dict.fromkeys(range(RANKS), 0.0)  # by rank: seconds that the others waited because it called last
    for same in zip(*collectives(timelines), strict=True):
        last = max(range(RANKS), key=lambda rank: same[rank].called)
        waited[last] += sum(call.ready - call.called for call in same)
    named = culprit(*in_seconds(timelines, steps)) == (fault, at if fault in WITH_A_RANK else None)
    ratios = [parts / seconds for parts, seconds in zip(mine, clock[1:], strict=True)]
    return Found(named, fault != STRAGGLER or max(waited, key=waited.__getitem__) == at, ratios)


def rows(results: list[list[list[Found]]], busy: bool) -> list[TableRow]:
    """results: of each rank, each run, each fault."""
    runs, load = len(results[0]), ", all cores busy" if busy else ""
    ratios = [ratio for rank in results for run in rank for found in run for ratio in found.ratios]
    table = [
        TableRow(
            f"parts / step by the rank's own clock, {len(ratios)} steps of {RANKS} ranks{load}: least, most",
            "1.00 ± 0.01",
            f"{min(ratios):.4f}, {max(ratios):.4f}",
            all(abs(ratio - 1) <= 0.01 for ratio in ratios),
        )
    ]
    for place, fault in enumerate(FAULTS):
        named = sum(all(rank[run][place].named for rank in results) for run in range(runs))
        table.append(TableRow(f"{fault}: named from the profile{load}", "all", f"{named} of {runs}", named == runs))
    place = FAULTS.index(STRAGGLER)
    seen = sum(all(rank[run][place].straggler for rank in results) for run in range(runs))
    table.append(
        TableRow(f"straggler: the rank that others wait for longest{load}", "all", f"{seen} of {runs}", seen == runs)
    )
    return table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--runs", type=positive_count, default=4, help="runs of each fault (default: 4)")
    parser.add_argument("--busy", action="store_true", help="keep all cores busy meanwhile")


def main(options: argparse.Namespace) -> int:
    print(f"Profiles of a job with a planted fault on {machine()}.\n", flush=True)
    with busy_cores() if options.busy else contextlib.nullcontext():
        began = time.monotonic()
        results = run_ranks(RANKS, run_all, options.runs, timeout=120 + 60 * options.runs)
        print(f"{time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    return report(rows(results, options.busy))
