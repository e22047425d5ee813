"""Judges a `my_ddp.py`: each criterion on ranks of its own process group, for a limited time; then under torchrun."""

import datetime
import importlib
from collections.abc import Iterable
from pathlib import Path

import torch.distributed as dist

from scratch_ddp.course.capstone import criteria, places, real_loop
from scratch_ddp.course.capstone.own_class import borrowed_by, load, problem_of
from scratch_ddp.instruments.forked_ranks import RankFailed, run_ranks

RANKS, LIMIT = 3, 10.0  # seconds that a rank waits for another
OWN = "own work"
PROMISES = {OWN: "written with torch's tensors and collectives"}
PROMISES |= {name: promise for name, (promise, _) in criteria.ON_RANKS.items()} | real_loop.PROMISES


def judge(path: Path, limit: float = LIMIT, patience: float = real_loop.PATIENCE) -> dict[str, str]:
    """Return what is wrong by criterion; "" where it holds."""
    path = path.resolve()
    try:
        (problem,) = set(run_ranks(1, problem_of, path, timeout=limit))
    except RankFailed:
        problem = f"{path.name} can't be imported: that takes longer than {limit:.0f} seconds, or ends the process"
    if problem:
        return dict.fromkeys(PROMISES, problem)
    (borrowed,) = run_ranks(1, borrowed_by, path, timeout=limit)
    return {OWN: borrowed} | on_ranks(path, limit) | real_loop.judge(path, patience)


def on_ranks(path: Path, limit: float = LIMIT, names: Iterable[str] = criteria.ON_RANKS) -> dict[str, str]:
    """What is wrong by criterion. Where ranks fail or wait, they are ended, and the next criterion gets new ones."""
    importlib.import_module("torch._dynamo.utils")  # which the profiler needs: here once, instead of on each rank
    left, found, at_once = list(names), {}, len(criteria.ON_RANKS)
    while left:
        tried = left[:at_once]
        seconds = limit * (1 if len(tried) == 1 else 3) + 2
        try:
            reports = run_ranks(RANKS, work, path, tried, limit, timeout=seconds, waits=limit)
        except RankFailed as failed:  # a rank died or does not answer, and takes the others' reports along
            if len(tried) > 1:
                at_once = 1
                continue
            last_words = {rank: report.splitlines()[-1] for rank, report in sorted(failed.failures.items())}
            found[left.pop(0)] = "; ".join(f"rank {rank} {words}" for rank, words in last_words.items())
            continue
        done = min(map(len, reports))
        found |= {name: sentence([report[i] for report in reports]) for i, name in enumerate(tried[:done])}
        left = left[done:]
    return found


def work(path: Path, names: list[str], limit: float) -> list[tuple[bool, str]]:
    """On a rank: (whether all ranks came to the end, what is wrong) for each criterion, up to the first that failed."""
    wrap, group = load(path).MyDDP, dist.new_group(timeout=datetime.timedelta(seconds=limit))
    entries = []
    for name in names:
        _, examine = criteria.ON_RANKS[name]
        try:
            complaint = examine(wrap, group)
            dist.barrier(group)
        except Exception as error:
            return [*entries, (False, places.in_words(path, error))]
        entries.append((True, complaint))
    return entries


def sentence(entries: list[tuple[bool, str]]) -> str:
    """What the ranks report about a criterion, in a sentence; "" if it holds."""
    said = {rank: words for rank, (_, words) in enumerate(entries) if words}
    if all(ended for ended, _ in entries):
        return next((f"rank {rank}: {words}" for rank, words in said.items()), "")
    raised = {rank: words for rank, words in said.items() if not words.startswith(places.WAITS)}
    return "; ".join(f"rank {rank} {words}" for rank, words in (raised or said).items())
