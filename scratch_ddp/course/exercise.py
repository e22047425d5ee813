"""What an exercise is: a reference, inputs to try it on, and what its stub and its answer are made from.

The reference has its answer between two marker comments, `# answer: begin` and `# answer: end`. The learner gets the
reference without what stands between the markers; `solution` shows it without the markers; a wrong answer, in the
tests, is an edit of it. So none of them can drift away from the others.
"""

import ast
import functools
import importlib
import importlib.util
import inspect
import pkgutil
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from scratch_ddp.course.arena import At
from scratch_ddp.course.compare import leaves, same

YOUR_CODE = "raise NotImplementedError  # your code"
ANSWER = re.compile(r"^([ ]*)# answer: begin\n(.*?)^[ ]*# answer: end\n", re.MULTILINE | re.DOTALL)

Seen = tuple[str, str, Any]  # what a use yields: the criterion, what is looked at, its value


class Wrong(Exception):
    """Raised by a `use`: what the answer did makes no sense. `criterion` fails with these words, and no other holds."""

    def __init__(self, criterion: str, words: str):
        super().__init__(criterion, words)
        self.criterion, self.words = criterion, words


def call(answer: Callable, *args: Any) -> Iterator[Seen]:
    """How an answer is used unless the exercise says otherwise: called once. Seen: its result, then its arguments.

    What the reference leaves alone of an argument is a matter of `untouched`, the rest of `value`.
    """
    names = [name for name, _ in zip(inspect.signature(answer).parameters, args, strict=False)]
    before = {name: leaves(arg, f"`{name}`") for name, arg in zip(names, args, strict=True)}
    yield "value", "the result", answer(*args)
    for name, arg in zip(names, args, strict=True):
        for what, now in leaves(arg, f"`{name}`").items():
            yield ("untouched" if same(now, before[name].get(what)) else "value"), what, now


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

    def stub_cell(self) -> str:
        return self.cell(stub(self.reference))

    def answer_cell(self) -> str:
        return self.cell(answer(self.reference))

    def cell(self, definition: str) -> str:
        """The cell that holds the function: the given imports, then `definition`."""
        return (f"{self.given.strip()}\n\n\n" if self.given else "") + definition.rstrip("\n")


@functools.cache
def all_exercises(beside: Path = Path()) -> dict[str, Exercise]:
    """Every exercise by its name, lesson by lesson: the EXERCISES of each module `lessons/lesson_…`.

    Then those of each file `lesson_….py` in the folder `beside`, where the notebook is: a kernel's current folder.
    """
    package = importlib.import_module("scratch_ddp.course.lessons")
    names = sorted(info.name for info in pkgutil.iter_modules(package.__path__) if info.name.startswith("lesson_"))
    modules = [importlib.import_module(f"{package.__name__}.{name}") for name in names]
    modules += [_loaded(path) for path in sorted(beside.glob("lesson_*.py"))]
    found: dict[str, Exercise] = {}
    for exercise in (exercise for module in modules for exercise in module.EXERCISES):
        if exercise.name in found:
            raise ValueError(f"two exercises are called {exercise.name}")
        found[exercise.name] = exercise
    return found


def _loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path.absolute())
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def exercise_of(function: Any) -> Exercise:
    """The exercise that a learner's function answers. Raises TypeError or ValueError that says what is accepted."""
    if not callable(function) or not hasattr(function, "__name__"):
        raise TypeError(f"give the function itself, as in check(tree_broadcast), not {type(function).__name__}")
    if function.__name__ not in all_exercises():
        raise ValueError(f"no exercise is called {function.__name__!r}. There are {', '.join(all_exercises())}")
    return all_exercises()[function.__name__]


def borrows(function: Callable, name: str) -> str:
    """The package's own `name`, if the learner's function is it or calls it; "" if the answer is the learner's."""
    code, known = getattr(function, "__code__", None), getattr(function, "__globals__", {})
    called = [known.get(each) for each in (code.co_names if code else ())]
    for thing in [function, *called]:
        if isinstance(thing, ModuleType) and name in code.co_names:  # module.name(…)
            thing = getattr(thing, name, None)
        home = str(getattr(thing, "__module__", "")).split(".")[0]
        if home == "scratch_ddp" and getattr(thing, "__name__", "") == name:
            return f"{thing.__module__}.{name}"
    return ""


def reference_source(reference: Callable) -> str:
    """The reference as it stands in the package, markers included, without decorators and not indented."""
    text = textwrap.dedent(inspect.getsource(inspect.unwrap(reference)))
    first = ast.parse(text).body[0].lineno  # of `def` or `class`, below the decorators
    text = "".join(text.splitlines(keepends=True)[first - 1 :])
    if not ANSWER.search(text) or "# answer:" in ANSWER.sub("", text):
        raise ValueError(f"{reference.__name__}: the answer must stand between `# answer: begin` and `# answer: end`")
    return text


def stub(reference: Callable) -> str:
    """What the learner starts from: the reference, with a place to write where its answer stands."""
    return ANSWER.sub(lambda found: f"{found[1]}{YOUR_CODE}\n", reference_source(reference))


def answer(reference: Callable) -> str:
    """The reference as a learner might have written it: without the markers."""
    return ANSWER.sub(lambda found: found[2], reference_source(reference))


def is_stub(function: Callable, reference: Callable) -> bool:
    """Whether `function` still does exactly what the stub does; its comments and its docstring may differ."""
    try:
        written = textwrap.dedent(inspect.getsource(function))
        return "NotImplementedError" in written and _meaning(written) == _meaning(stub(reference))
    except (OSError, TypeError, SyntaxError):  # no source to read: the call will tell
        return False


def _meaning(text: str) -> str:
    definition = ast.parse(text).body[0]
    if ast.get_docstring(definition) is not None:
        definition.body = definition.body[1:]
    return ast.dump(definition)
