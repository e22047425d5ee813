"""A wrong answer to an exercise: an edit of the reference, or another body, and the complaint that it must get."""

import functools
import importlib
import pkgutil
import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field

from scratch_ddp.course.exercise import ANSWER, Exercise, reference_source


@dataclass(frozen=True)
class WrongAnswer:
    """An answer that must be refused at 4 ranks: by which criterion, and with which words in that criterion's line.

    `edits` change the reference's answer (each old text stands in it exactly once); `body` replaces the whole answer
    where a mistake is not an edit. `also` are criteria that fail with it; all others hold.
    """

    mistake: str
    fails: str
    says: str
    edits: dict[str, str] = field(default_factory=dict)
    body: str = ""
    also: tuple[str, ...] = ()

    def cell(self, exercise: Exercise) -> str:
        """The cell that a learner would have run."""
        definition = rewritten(exercise.reference, self.body) if self.body else edited(exercise.reference, self.edits)
        return exercise.cell(definition)


def edited(reference: Callable, edits: dict[str, str]) -> str:
    """The answer with each key replaced by its value. Raises ValueError unless each key stands in it exactly once."""
    text = reference_source(reference)
    found = ANSWER.search(text)
    body = found[2]
    for old, new in edits.items():
        if body.count(old) != 1:
            raise ValueError(f"{reference.__name__}: {old!r} stands {body.count(old)} times in the answer, not once")
        body = body.replace(old, new)
    return text[: found.start()] + body + text[found.end() :]


def rewritten(reference: Callable, body: str) -> str:
    """The stub with `body`, indented as needed, where the learner writes."""

    def fill(found: re.Match) -> str:
        return textwrap.indent(textwrap.dedent(body).strip("\n"), found[1]) + "\n"

    return ANSWER.sub(fill, reference_source(reference))


@functools.cache
def all_wrong_answers() -> dict[str, tuple[WrongAnswer, ...]]:
    """By the exercise's name: the WRONG_ANSWERS of each module in `wrong_answers/`."""
    found: dict[str, tuple[WrongAnswer, ...]] = {}
    package = importlib.import_module("tests.course.wrong_answers")
    for info in pkgutil.iter_modules(package.__path__):
        found.update(importlib.import_module(f"{package.__name__}.{info.name}").WRONG_ANSWERS)
    return found
