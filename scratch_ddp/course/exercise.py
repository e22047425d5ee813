"""What an exercise consists of, and where it is found by its name."""

import functools
import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from scratch_ddp.exercises import source

if TYPE_CHECKING:
    from scratch_ddp.exercises.trial import Trial


@dataclass(frozen=True)
class WrongAnswer:
    """An answer that must be refused at 4 ranks: by which criterion, and with which words in that criterion's line.

    `edits` change the reference's answer (each old text stands in it exactly once); `body` takes the whole answer's
    place where a mistake is not an edit. `also` are criteria that fail with it; all others hold.
    """

    mistake: str
    fails: str
    says: str
    edits: dict[str, str] = field(default_factory=dict)
    body: str = ""
    also: tuple[str, ...] = ()


@dataclass(frozen=True)
class Exercise:
    """A function that learners write, known by its name.

    `reference` holds the answer between the markers of `exercises.source`; `examine` calls the learner's function
    through a Trial and states the criteria; `given` are the imports that the stub's cell begins with.
    """

    reference: Callable[..., Any]
    examine: "Callable[[Trial], None]"
    wrong: tuple[WrongAnswer, ...]
    given: str = ""

    @property
    def name(self) -> str:
        return self.reference.__name__

    def stub_cell(self) -> str:
        return self._cell(source.stub(self.reference))

    def answer_cell(self) -> str:
        return self._cell(source.answer(self.reference))

    def wrong_cell(self, wrong: WrongAnswer) -> str:
        if wrong.body:
            return self._cell(source.rewritten(self.reference, wrong.body))
        return self._cell(source.edited(self.reference, wrong.edits))

    def _cell(self, definition: str) -> str:
        return (f"{self.given.strip()}\n\n\n" if self.given else "") + definition.rstrip("\n")


@functools.cache
def all_exercises() -> dict[str, Exercise]:
    """Every exercise by its name, lesson by lesson: the EXERCISES of each module `lesson_…` beside this one."""
    found: dict[str, Exercise] = {}
    package = importlib.import_module("scratch_ddp.exercises")
    for module in sorted(info.name for info in pkgutil.iter_modules(package.__path__)):
        if module.startswith("lesson_"):
            for exercise in importlib.import_module(f"scratch_ddp.exercises.{module}").EXERCISES:
                if exercise.name in found:
                    raise ValueError(f"two exercises are called {exercise.name}")
                found[exercise.name] = exercise
    return found


def exercise_of(function: Any) -> Exercise:
    """The exercise that a learner's function answers. Raises TypeError or ValueError saying what it takes."""
    if not callable(function) or not hasattr(function, "__name__"):
        raise TypeError(f"give the function itself, as in check(tree_broadcast), not {type(function).__name__}")
    try:
        return all_exercises()[function.__name__]
    except KeyError:
        names = ", ".join(all_exercises())
        raise ValueError(f"no exercise is called {function.__name__!r}; there are {names}") from None
