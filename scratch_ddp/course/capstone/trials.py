"""Judges a `my_ddp.py`: each criterion on ranks, for a limited time; then under torchrun."""

import importlib
import inspect
from collections.abc import Iterable
from pathlib import Path

from scratch_ddp.cells.rank.interruptible_group import BACKEND
from scratch_ddp.course.arena import Arena
from scratch_ddp.course.capstone import criteria, real_loop
from scratch_ddp.course.capstone.criteria import EXERCISES
from scratch_ddp.course.check import try_cases
from scratch_ddp.course.run import in_short
from scratch_ddp.instruments.forked_ranks import RankFailed, run_ranks

AS_THE_ENGINE, FAILURES = {"replicas": "agreement"}, ("runs", "group", "waits", "written")  # its names
RANKS, LIMIT = 3, 20.0  # seconds for a class to do what a criterion asks
OWN = "own work"
PROMISES = {OWN: "written with torch's tensors and collectives"} | criteria.PROMISES | real_loop.PROMISES


def judge(path: Path) -> dict[str, str]:
    """Return what is wrong by criterion; "" where it holds."""
    path = path.resolve()
    try:
        (problem, borrowed) = run_ranks(1, looked_at, path, timeout=LIMIT)[0]
    except RankFailed:
        problem = f"{path.name} can't be imported: that takes longer than {LIMIT:.0f} seconds, or ends the process"
    if problem:
        return dict.fromkeys(PROMISES, problem)
    return {OWN: borrowed} | on_ranks(path) | real_loop.judge(path)


def looked_at(path: Path) -> tuple[str, str]:
    """Why the file holds no class to judge, or ""; and what it uses that does the work for it, or ""."""
    try:
        module = real_loop.load(path)
    except BaseException as error:
        return f"{path.name} can't be imported: {in_short(error)}", ""
    if not hasattr(module, "MyDDP"):
        return f"{path.name} defines no class MyDDP yet", ""
    bases = [(base.__name__, base) for base in getattr(module.MyDDP, "__mro__", ())]
    for name, used in [*vars(module).items(), *bases]:
        home = used.__name__ if inspect.ismodule(used) else getattr(used, "__module__", None) or ""
        if home.split(".")[0] == "scratch_ddp" or home.startswith("torch.nn.parallel"):
            return "", f"my_ddp.py uses {name} of {home}"
    return "", ""


def on_ranks(path: Path, limit: float = LIMIT, names: Iterable[tuple[str, ...]] = tuple(EXERCISES)) -> dict[str, str]:
    """What is wrong by criterion, for the exercises of these names. The class may take `limit` seconds for each."""
    importlib.import_module("torch._dynamo.utils")  # which the profiler needs: here once, instead of on each rank
    try:
        return run_ranks(RANKS, _judged, path, limit, names, backend=BACKEND, timeout=300)[0]
    except RankFailed as failed:  # a rank has died
        words = "; ".join(f"rank {rank} {report.splitlines()[-1]}" for rank, report in sorted(failed.failures.items()))
        return {name: words for each in names for name in each}


def _judged(path: Path, limit: float, names: Iterable[tuple[str, ...]]) -> dict[str, str]:
    module, found = real_loop.load(path), {}
    # As if it were a line of the learner's file, so that complaints name lines of it.
    wrap = eval(compile("lambda model: MyDDP(model)", str(path), "eval"), vars(module))
    for each in names:
        arena = Arena()
        with arena:
            complaints = try_cases(EXERCISES[each], wrap, arena, limit, arena.everyone)
        failed = next((words for name, words in complaints.items() if name in FAILURES and words), "")
        found |= {name: failed or complaints.get(AS_THE_ENGINE.get(name, name), "") for name in each}
    return found
