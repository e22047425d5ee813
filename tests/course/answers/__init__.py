"""Answers to exercises, honest mistakes and other right ones: read from text, and tried in a cell of a rank.

    tree_broadcast
      ✗ the source is taken to be rank 0 | value: src=1: `tensor`
        (rank - root) % n => rank

✗: the criterion that must refuse it, and words from its complaint, on 2 and 4 ranks; with `| n=4` on 4 alone. ✓: right.
A line with => is an edit of the reference's answer: what is on its left stands there exactly once. ⏎ is the end of a
line; the next one is indented as much as the edited one. Lines without => are the whole answer.
"""

import importlib
import itertools
import linecache
import os
import pkgutil
import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo  # noqa: F401  optimizers import it at first use: once here, not in every forked rank
import torch.distributed as dist

from scratch_ddp.cells.rank.interruptible_group import BACKEND  # and registers it
from scratch_ddp.course.check import examine
from scratch_ddp.course.exercise import Exercise
from tests.ranks import run_ranks

_cells = itertools.count()


@dataclass(frozen=True)
class Answer:
    """An answer to the exercise `name`. If it is wrong, `fails` must refuse it with the words `says`, on n ranks."""

    name: str
    title: str
    text: str
    fails: str = ""
    says: str = ""
    n: tuple[int, ...] = (2, 4)

    def cell(self, exercise: Exercise) -> str:
        """The cell that a learner would have run."""
        if re.match(rf"(def|class|from .* import) {self.name}\b", self.text):
            return self.text
        if " =>" in self.text:
            return exercise.answer_cell(lambda found: edited(found["answer"], self.text))
        return exercise.answer_cell(lambda found: textwrap.indent(self.text, found["indent"]))


def edited(body: str, edits: str) -> str:
    """A source after edits, a line each."""
    for edit in edits.splitlines():
        old, new = (each.strip() for each in edit.split(" =>", 1))
        places = list(re.finditer(re.escape(old).replace(r"\ ⏎\ ", r"\n *"), body))
        if len(places) != 1:
            raise ValueError(f"{old!r} stands {len(places)} times in the answer, not once")
        before, after = body[: places[0].start()], body[places[0].end() :]
        indent = re.match(" *", before.rpartition("\n")[2])[0]
        body = before + new.replace(" ⏎ ", "\n" + indent) + after
    return body


def read(text: str) -> list[Answer]:
    """The answers in a text, in its order."""
    answers, name = [], ""
    for block in re.split(r"^(?=\S|  [✗✓])", text, flags=re.MULTILINE):
        head, _, body = block.strip("\n").partition("\n")
        if not head.startswith(" "):
            name = head
            continue
        title, *refused = head[4:].split(" | ")
        fails, _, says = refused[0].partition(": ") if refused else ("", "", "")
        body = textwrap.dedent(body).rstrip() + "\n"
        answers.append(Answer(name, title, body, fails, says, (4,) if refused[1:] == ["n=4"] else (2, 4)))
    return answers


def all_answers() -> list[Answer]:
    """Those in the modules beside this one."""
    modules = [importlib.import_module(f"{__name__}.{each.name}") for each in pkgutil.iter_modules(__path__)]
    return [answer for module in modules for answer in read(module.ANSWERS)]


def examined(source: str, name: str, seconds: float = 5.0) -> dict[str, str]:
    """On a rank: define the function in a cell, with lines that tracebacks and inspect can show, and examine it."""
    file = f"<cell {os.getpid()}-{next(_cells)}>"
    linecache.cache[file] = (len(source), None, [line + "\n" for line in source.splitlines()], file)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    cell = {
        "__name__": "__main__",
        "rank": rank,
        "world_size": world_size,
        "device": torch.device("cpu"),
        "torch": torch,
        "dist": dist,
    }
    exec(compile(source, file, "exec"), cell)
    return examine(cell[name], seconds)


def on_ranks(n: int, function: Callable[[], Any], backend: str = BACKEND, timeout: float = 60) -> Any:
    """Run function() on n ranks; it must return the same on all of them, and that is returned."""
    first, *others = run_ranks(n, function, backend=backend, timeout=timeout)
    assert all(other == first for other in others), [first, *others]
    return first
