"""What an exercise is: a reference, what its stub and its answer are made from, and a test.

The reference has its answer between two marker comments, `# answer: begin` and `# answer: end`. The learner gets the
reference without what stands between the markers; `solution` shows it without the markers; a wrong answer, in the
tests, is an edit of it. So none of them can drift away from the others.
"""

import ast
import functools
import importlib.util
import inspect
import pkgutil
import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scratch_ddp.course.trial import Trial

YOUR_CODE = "raise NotImplementedError  # your code"
ANSWER = re.compile(r"^([ ]*)# answer: begin\n(.*?)^[ ]*# answer: end\n", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Exercise:
    """A function that learners write, known by its name.

    `reference` holds the answer between the markers; `examine` calls the learner's function through a Trial and states
    the criteria; `given` are the imports that the stub's cell begins with; `also_named`: what the package has in place
    of the answer under other names, which the answer may not call.
    """

    reference: Callable[..., Any]
    examine: "Callable[[Trial], None]"
    given: str = ""
    also_named: tuple[str, ...] = ()

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
    try:
        return all_exercises()[function.__name__]
    except KeyError:
        names = ", ".join(all_exercises())
        raise ValueError(
            f"no exercise is called {function.__name__!r}, and this is the function's own name (its __name__): define "
            f"it by the exercise's. There are {names}"
        ) from None


def borrows(function: Callable, exercise: Exercise) -> str:
    """What a learner's function calls of the package in place of an answer, imported in the notebook or in itself."""
    codes, known = [getattr(function, "__code__", None)], getattr(function, "__globals__", {})
    names = {exercise.name, *exercise.also_named}
    for code in codes:  # grows by the functions inside
        if code is None:
            continue
        called = names.intersection(code.co_names)
        things = [known[name] for name in code.co_names if name in known and known[name] is not function]
        for thing in filter(_of_the_package, things):
            held = {name for name in called if isinstance(thing, ModuleType) and hasattr(thing, name)}
            if found := held or names.intersection([getattr(thing, "__name__", "")]):
                return min(found)
        if called and any(name.split(".")[0] == "scratch_ddp" for name in code.co_names):
            return min(called)
        codes += [each for each in code.co_consts if hasattr(each, "co_names")]
    return ""


def _of_the_package(thing: Any) -> bool:
    module = thing.__name__ if isinstance(thing, ModuleType) else getattr(thing, "__module__", "")
    return str(module).split(".")[0] == "scratch_ddp"


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
        unwritten = "NotImplementedError" in written  # most answers need not be parsed, which takes milliseconds
        return unwritten and _meaning(written) == _meaning(stub(reference))
    except (OSError, TypeError, SyntaxError):  # no source to read: the call will tell
        return False


def _meaning(text: str) -> str:
    definition = ast.parse(text).body[0]
    if ast.get_docstring(definition) is not None:
        definition.body = definition.body[1:]
    return ast.dump(definition)
