"""Judges a `my_ddp.py`: each criterion on ranks of its own process group, for a limited time; then under torchrun."""

import datetime
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

import torch.distributed as dist
from torch import nn

from scratch_ddp.course.capstone import criteria, places, real_loop
from scratch_ddp.instruments.forked_ranks import RankFailed, run_ranks

RANKS, LIMIT = 3, 10.0  # seconds that a rank waits for another
NAME = "MyDDP"
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


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("my_ddp", path)
    module = sys.modules["my_ddp"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def problem_of(path: Path) -> str:
    """Why the file holds no class to judge, or ""."""
    try:
        found = getattr(load(path), NAME, None)
    except BaseException as error:
        return f"{path.name} can't be imported: {places.in_words(path, error)}"
    if found is None:
        return f"{path.name} defines no class {NAME} yet"
    if not (inspect.isclass(found) and issubclass(found, nn.Module)):
        return f"{NAME} is not a class that inherits from torch.nn.Module"
    missing = [name for name in ("forward", "no_sync", "sync_gradients") if name not in dir_of(found)]
    return f"{NAME} has no {missing[0]}()" if missing else ""


def dir_of(found: type) -> set[str]:
    """The names that a class and its bases define, without those of nn.Module."""
    return {name for base in found.__mro__ if base not in (nn.Module, object) for name in vars(base)}


def borrowed_by(path: Path) -> str:
    """Say what the file uses that does the work for it, or ""."""
    module = load(path)
    for name, used in [*vars(module).items(), *((base.__name__, base) for base in module.MyDDP.__mro__)]:
        home = used.__name__ if inspect.ismodule(used) else getattr(used, "__module__", None) or ""
        if home.split(".")[0] == "scratch_ddp" or home.startswith("torch.nn.parallel"):
            return f"{path.name} uses {name} of {home}"
    if "DistributedDataParallel" in path.read_text():
        return f"{path.name} uses torch's DistributedDataParallel"
    return ""


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
