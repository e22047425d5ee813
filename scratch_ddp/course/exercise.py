"""What an exercise is: a reference, inputs to try it on, and what its stub and its answer are made from.

The answer stands in the reference behind the first comment that ends with a question mark, and goes on to the comment
`# end of the answer` or to the reference's end. The learner gets what is left; `solution` shows all; a wrong answer, in
the tests, is an edit of it.
"""

import copy
import functools
import importlib
import inspect
import re
import runpy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from scratch_ddp.course.compare import copied, difference, parts

YOUR_CODE = "raise NotImplementedError  # your code"
ANSWER = re.compile(
    r"(?P<question>(?:^ *#[^\n]*\n)*^(?P<indent> *)#[^\n]*\?\n)(?P<answer>.*?)(?:^ *# end of the answer\n|\Z)",
    re.MULTILINE | re.DOTALL,
)
RESULT = "the result"
LESSONS = Path(__file__).parent / "lessons"

Seen = tuple[str, str, Any]  # what a use yields: the criterion, what is looked at, its value
Write = Callable[[re.Match], str]  # what is to stand in place of the answer


@dataclass(frozen=True)
class At:
    """Where inputs are made: on rank `rank` of `n`.

    members: global numbers of the n ranks, for arguments such as `src`. group: None stands for all ranks. The engine
    passes it to the answer.
    """

    rank: int
    n: int
    members: tuple[int, ...]
    group: dist.ProcessGroup | None = None
    _meshes: dict[str, DeviceMesh] = field(default_factory=dict)

    def mesh(self, **sizes: int) -> DeviceMesh:
        """A mesh of all ranks with these dimensions. The answer gets the one that was made for the reference."""
        ranks = torch.arange(self.n).view(*sizes.values())
        if str(sizes) not in self._meshes:
            self._meshes[str(sizes)] = DeviceMesh("cpu", ranks, mesh_dim_names=tuple(sizes))
        return self._meshes[str(sizes)]


@dataclass
class Wrong(Exception):
    """What the answer did makes no sense. `criterion` fails with these words, and no other holds."""

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

    reference: holds the answer, behind a question.
    inputs: (at) -> yields (case, this rank's arguments). It runs twice, for the reference and for the answer, each
        time with the same seed. Arguments lie on the CPU. Where all ranks get the same: a dict of cases, or a list of
        arguments, which name their case as a call.
    use: (answer, *arguments) -> yields (criterion, what, value), in the same order for the reference and the answer.
        Each value is copied when it is yielded, and compared.
    close: how far numbers may be off, relative to the largest; 0 means that all bits count.
    room: (at, *arguments) -> elements of the first tensor's dtype that a rank may hold beside its arguments.
    cost: whether calls, messages, bytes and depth may not exceed those of the reference.
    given: imports that the stub's cell begins with.
    """

    reference: Callable[..., Any]
    inputs: Callable[[At], Iterator[tuple[str, tuple]]] | Mapping[str, tuple] | Sequence[tuple]
    use: Callable[..., Iterator[Seen]] = call
    close: float = 0.0
    room: Callable[..., int] | None = None
    cost: bool = True
    given: str = ""

    @property
    def name(self) -> str:
        return self.reference.__name__

    def cases(self, at: At) -> Iterator[tuple[str, tuple]]:
        """The cases of `inputs`, each time with arguments of their own."""
        if callable(self.inputs):
            return self.inputs(at)
        named = self.inputs
        if not isinstance(named, Mapping):
            named = {f"{self.name}({', '.join(map(repr, given))})": given for given in named}
        return iter(copy.deepcopy(list(named.items())))

    @property
    def returns(self) -> bool:
        """Whether the reference returns anything. If not, an answer may return what it likes."""
        return re.search(r"^ +return \S", self.source(), re.MULTILINE) is not None

    def stub_cell(self) -> str:
        """What the learner starts from: the reference, with a place to write where its answer stands."""
        return self.answer_cell(lambda found: f"{found['indent']}{YOUR_CODE}\n")

    def answer_cell(self, write: Write = itemgetter("answer")) -> str:
        """The cell of a learner who has written that: the given imports, then the function."""
        return "\n\n\n".join(filter(None, [self.given, self.source(write)]))

    def source(self, write: Write = itemgetter("answer")) -> str:
        """The reference without decorators, with what `write` makes of its answer; by default, as it stands."""
        text = inspect.getsource(self.reference)
        text = text[re.search("^(def|class) ", text, re.MULTILINE).start() :]
        if not ANSWER.search(text):
            raise ValueError(f"{self.name}: put a comment that asks a question (with a ?) before the answer")
        return ANSWER.sub(lambda found: found["question"] + write(found), text, count=1).rstrip("\n")


@functools.cache
def all_exercises(beside: Path = Path()) -> dict[str, Exercise]:
    """Every exercise by its name, lesson by lesson: the EXERCISES of each module `lessons/lesson_…`.

    Then those of each file `lesson_….py` in the folder `beside`, where the notebook is: a kernel's current folder. Of
    two with one name the last counts.
    """
    names = sorted(path.stem for path in LESSONS.glob("lesson_*.py"))
    lessons = [importlib.import_module(f"scratch_ddp.course.lessons.{name}").EXERCISES for name in names]
    lessons += [runpy.run_path(str(path.absolute()))["EXERCISES"] for path in sorted(beside.glob("lesson_*.py"))]
    return {exercise.name: exercise for lesson in lessons for exercise in lesson}


def exercise_of(function: Any) -> Exercise:
    """The exercise that a learner's function answers. Raises ValueError that says what is accepted."""
    name = getattr(function, "__name__", None)
    if name not in all_exercises():
        known = ", ".join(all_exercises())
        raise ValueError(f"{name or function!r} is no exercise: give the function itself, one of {known}")
    return all_exercises()[name]
