"""Answers to exercises: wrong and right ones as data, written into a cell of a rank as a learner would."""

import importlib
import itertools
import linecache
import os
import pkgutil
import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch._dynamo  # noqa: F401  optimizers import it at first use: once here, not in every forked rank
import torch.distributed as dist

from scratch_ddp.cells.rank.interruptible_group import BACKEND  # and registers it
from scratch_ddp.course import Verdict, examine
from scratch_ddp.course.exercise import ANSWER, Exercise, reference_source
from tests.ranks import run_ranks

_cells = itertools.count()


@dataclass(frozen=True)
class WrongAnswer:
    """An answer that must be refused: by which criterion, and with which words in that criterion's line.

    `edits` change the reference's answer (each old text stands in it exactly once); `body` replaces the whole answer
    where a mistake is not an edit. `n`: the numbers of ranks on which it is wrong.
    """

    mistake: str
    fails: str
    says: str
    edits: dict[str, str] = field(default_factory=dict)
    body: str = ""
    n: tuple[int, ...] = (2, 4)

    def cell(self, exercise: Exercise) -> str:
        """The cell that a learner would have run."""
        return cell(exercise, self.body or self.edits)


def cell(exercise: Exercise, answer: dict[str, str] | str) -> str:
    """The cell of an answer: edits of the reference, a whole cell if it defines the function, or else a body."""
    if isinstance(answer, dict):
        return exercise.cell(_edited(exercise.reference, answer))
    answer = textwrap.dedent(answer)
    whole = re.search(rf"^(def|class) {exercise.name}\b", answer, re.MULTILINE)
    return answer if whole else exercise.cell(_rewritten(exercise.reference, answer))


def _edited(reference: Callable, edits: dict[str, str]) -> str:
    """The answer with each key replaced by its value. Raises ValueError unless each key stands in it exactly once."""
    text = reference_source(reference)
    found = ANSWER.search(text)
    body = found[2]
    for old, new in edits.items():
        if body.count(old) != 1:
            raise ValueError(f"{reference.__name__}: {old!r} stands {body.count(old)} times in the answer, not once")
        body = body.replace(old, new)
    return text[: found.start()] + body + text[found.end() :]


def _rewritten(reference: Callable, body: str) -> str:
    """The stub with `body`, indented as needed, where the learner writes."""
    return ANSWER.sub(lambda found: textwrap.indent(body.strip("\n"), found[1]) + "\n", reference_source(reference))


def answers_in(package: str, name: str) -> dict[str, Any]:
    """By exercise: what `name` holds in each module of `tests/course/<package>`."""
    package = importlib.import_module(f"tests.course.{package}")
    modules = [
        importlib.import_module(f"{package.__name__}.{each.name}") for each in pkgutil.iter_modules(package.__path__)
    ]
    return {exercise: answers for module in modules for exercise, answers in getattr(module, name).items()}


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


def examined(source: str, name: str, seconds: float = 5.0) -> Verdict:
    """On a rank: define the function in a cell, and examine it."""
    return examine(run_cell(source)[name], seconds)


def on_ranks(n: int, function: Callable[..., Any], *args: Any, backend: str = BACKEND, **options: Any) -> Any:
    """Run function(*args) on n ranks; it must return the same on all of them, and that is returned."""
    first, *others = run_ranks(n, function, *args, backend=backend, **options)
    assert all(other == first for other in others), [first, *others]
    return first
