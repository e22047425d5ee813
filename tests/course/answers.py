"""Answers to exercises, written into a cell of a rank as a learner would."""

import itertools
import linecache
import os
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo  # noqa: F401  optimizers import it at first use: once here, not in every forked rank
import torch.distributed as dist

from scratch_ddp.cells.rank.interruptible_group import BACKEND  # and registers it
from scratch_ddp.course import Verdict, examine
from tests.ranks import run_ranks

_cells = itertools.count()


def define(source: str, namespace: dict[str, Any] | None = None) -> dict[str, Any]:
    """Run source as a cell of its own, with lines that tracebacks and inspect can show; returns its namespace."""
    file = f"<cell {os.getpid()}-{next(_cells)}>"
    linecache.cache[file] = (len(source), None, [line + "\n" for line in source.splitlines()], file)
    namespace = {} if namespace is None else namespace
    exec(compile(source, file, "exec"), namespace)
    return namespace


def run_cell(source: str) -> dict[str, Any]:
    """Run source as a rank's cell: with a rank's variables."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    variables = {"rank": rank, "world_size": world_size, "device": torch.device("cpu"), "torch": torch, "dist": dist}
    return define(source, variables)


def examined(source: str, name: str, seconds: float = 5.0, seed: int | None = None) -> Verdict:
    """On a rank: define the function in a cell, and examine it."""
    return examine(run_cell(source)[name], seconds, seed)


def on_ranks(n: int, function: Callable[..., Any], *args: Any, backend: str = BACKEND, **options: Any) -> Any:
    """Run function(*args) on n ranks; it must return the same on all of them, and that is returned."""
    first, *others = run_ranks(n, function, *args, backend=backend, **options)
    assert all(other == first for other in others), [first, *others]
    return first
