"""What an exercise is: a reference, inputs to try it on, and what its stub and its answer are made from.

The reference has its answer between two marker comments, `# answer: begin` and `# answer: end`. The learner gets the
reference without what stands between the markers; `solution` shows it without the markers; a wrong answer, in the
tests, is an edit of it. So none of them can drift away from the others.
"""

import ast
import functools
import importlib
import inspect
import re
import runpy
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from scratch_ddp.course.arena import At
from scratch_ddp.course.compare import copied, difference, parts

YOUR_CODE = "raise NotImplementedError  # your code"
ANSWER = re.compile(r"^([ ]*)# answer: begin\n(.*?)^[ ]*# answer: end\n", re.MULTILINE | re.DOTALL)
RESULT = "the result"
LESSONS = Path(__file__).parent / "lessons"

Seen = tuple[str, str, Any]  # what a use yields: the criterion, what is looked at, its value


@dataclass
class Wrong(Exception):
    """Raised by a `use`: what the answer did makes no sense. `criterion` fails with these words, and no other holds."""

    criterion: str
    words: str


def call(answer: Callable, *args: Any) -> Iterator[Seen]:
    """How an answer is used unless the exercise says otherwise: called once. Seen: its result, then its arguments.

    What the reference leaves alone of an argument is a matter of `untouched`, the rest `value`.
    """
    named = zip(inspect.signature(answer).parameters, args, strict=False)
    given = {name: arg for name, arg in named if isinstance(arg, (torch.Tensor, nn.Module, list, dict))}
    before = {name: copied(parts(arg)) for name, arg in given.items()}
    yield "value", RESULT, answer(*args)
    for name, arg in given.items():
        for part, now in parts(arg).items():
            changed = difference("", copied(now), before[name].get(part))
            yield ("value" if changed else "untouched"), part or f"`{name}`", now


@dataclass(frozen=True)
class Exercise:
    """A function that learners write, known by its name. On every rank it must do what `reference` does.

    reference: holds the answer between the markers.
    inputs: (at) -> yields (case, this rank's arguments). It runs twice, for the reference and for the answer, each
        time with the same seed. Arguments lie on the CPU.
    use: (answer, *arguments) -> yields (criterion, what, value), in the same order for the reference and the answer.
        Each value is copied when it is yielded, and compared.
    close: how far numbers may be off, relative to the largest; 0 means that all bits count.
    room: (*arguments) -> elements of the first tensor's dtype that a rank may hold beside its arguments.
    cost: whether calls, messages, bytes and depth may not exceed those of the reference.
    given: imports that the stub's cell begins with.
    """

    reference: Callable[..., Any]
    inputs: Callable[[At], Iterator[tuple[str, tuple]]]
    use: Callable[..., Iterator[Seen]] = call
    close: float = 0.0
    room: Callable[..., int] | None = None
    cost: bool = True
    given: str = ""

    @property
    def name(self) -> str:
        return self.reference.__name__

    @property
    def takes_group(self) -> bool:
        return "group" in inspect.signature(self.reference).parameters

    @property
    def returns(self) -> bool:
        """Whether the reference returns anything. If not, an answer may return what it likes."""
        return re.search(r"^ +return \S", answer(self.reference), re.MULTILINE) is not None

    def stub_cell(self) -> str:
        """What the learner starts from: the reference, with a place to write where its answer stands."""
        return self.cell(ANSWER.sub(lambda found: f"{found[1]}{YOUR_CODE}\n", reference_source(self.reference)))

    def answer_cell(self) -> str:
        """The reference as a learner might have written it: without the markers."""
        return self.cell(answer(self.reference))

    def cell(self, definition: str) -> str:
        """The cell that holds the function: the given imports, then `definition`."""
        return (f"{self.given.strip()}\n\n\n" if self.given else "") + definition.rstrip("\n")


@functools.cache
def all_exercises(beside: Path = Path()) -> dict[str, Exercise]:
    """Every exercise by its name, lesson by lesson: the EXERCISES of each module `lessons/lesson_…`.

    Then those of each file `lesson_….py` in the folder `beside`, where the notebook is: a kernel's current folder.
    """
    names = sorted(path.stem for path in LESSONS.glob("lesson_*.py"))
    lessons = [importlib.import_module(f"scratch_ddp.course.lessons.{name}").EXERCISES for name in names]
    lessons += [runpy.run_path(str(path.absolute()))["EXERCISES"] for path in sorted(beside.glob("lesson_*.py"))]
    found: dict[str, Exercise] = {}
    for exercise in (exercise for lesson in lessons for exercise in lesson):
        if exercise.name in found:
            raise ValueError(f"two exercises are called {exercise.name}")
        found[exercise.name] = exercise
    return found


def exercise_of(function: Any) -> Exercise:
    """The exercise that a learner's function answers. Raises TypeError or ValueError that says what is accepted."""
    if not callable(function) or not hasattr(function, "__name__"):
        raise TypeError(f"give the function itself, as in check(tree_broadcast), not {type(function).__name__}")
    if function.__name__ not in all_exercises():
        raise ValueError(f"no exercise is called {function.__name__!r}. There are {', '.join(all_exercises())}")
    return all_exercises()[function.__name__]


def borrowed(function: Callable) -> str:
    """The package's own function of that name, if the learner's is it or calls it; "" if it is the learner's own."""
    name, names = function.__name__, getattr(getattr(function, "__code__", None), "co_names", ())
    used = [function, *(function.__globals__.get(each) for each in names)]
    used += [getattr(each, name, None) for each in used if isinstance(each, ModuleType) and name in names]
    found = (f"{getattr(each, '__module__', '')}.{getattr(each, '__name__', '')}" for each in used)
    return next((each for each in found if each.startswith("scratch_ddp.") and each.endswith(f".{name}")), "")


def reference_source(reference: Callable) -> str:
    """The reference as it stands in its file, markers included, without decorators and not indented."""
    text = textwrap.dedent(inspect.getsource(inspect.unwrap(reference)))
    first = ast.parse(text).body[0].lineno  # of `def` or `class`, below the decorators
    text = "".join(text.splitlines(keepends=True)[first - 1 :])
    if not ANSWER.search(text):
        raise ValueError(f"{reference.__name__}: the answer must stand between `# answer: begin` and `# answer: end`")
    return text


def answer(reference: Callable) -> str:
    """The reference without the markers."""
    return ANSWER.sub(lambda found: found[2], reference_source(reference))
