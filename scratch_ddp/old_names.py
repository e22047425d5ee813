"""Modules that were moved: `from scratch_ddp.traffic import traffic` still works and says where `traffic` is now.

For one release, because learners' copies of the lessons and scripts import from the old places. To remove it, delete
this file, its test, and the line in `scratch_ddp/__init__.py`.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any

PACKAGE = "scratch_ddp."

# An old module, and where its names are now; if in several modules, the first that has the name is right.
MOVED = """
agreement                     common.agreement
benchmark.fit                 instruments.bandwidth instruments.bandwidth.alpha_beta
benchmark.published_step      course.pages.published_step
benchmark.ranks               instruments.forked_ranks
benchmark.report              instruments.timing
benchmark.results             instruments.bandwidth instruments.bandwidth.results
benchmark.sleeping_model      course.pages.sleeping
benchmark.timing              instruments.timing
buffers                       common.replicas
checkpoint                    common.checkpoint
collectives.rings             collectives
collectives.trees             collectives
cost                          ddp.bucketed common.tensors instruments.cost
course.lessons.loop_probe     course.pages.loop_probe
course.lessons.published_step course.pages.published_step
course.lessons.sleeping_model course.pages.sleeping
course.lessons.sleeping_stage course.pages.sleeping
course.lessons.three_ways     course.pages.split_model
data                          training training.data
ddp.hooks                     ddp.reducer
evaluation                    training training.evaluation
exercises                     course
exercises.notebooks           commands.stubs
instruments.cost.forecast     instruments.cost.layouts.forecast
instruments.cost.models       instruments.cost.layouts.models
link                          instruments.network
link.pace                     instruments.network.clock
memory                        instruments.memory
models                        training training.models
plots                         course.plots
profiling                     instruments.timeline
progress                      common.progress
protocol                      common.wrapper
replicas                      common.replicas
residency                     instruments.memory.ledger
sharding                      training training.data
traffic                       common.accounting instruments.traffic
train                         training.__main__
watched_loop                  course.pages.loop_probe
"""
PLACES = {old: new for old, *new in (line.split() for line in MOVED.strip().splitlines())}
PLACES.update({f"exercises.lesson_{n:02d}": [f"course.lessons.lesson_{n:02d}"] for n in range(12)})

COMMANDS = {  # what `python -m` an old module does
    "train": "import runpy; runpy.run_module('scratch_ddp.training', run_name='__main__')",
    "exercises.notebooks": "import sys; sys.exit('The stubs are written by: python3 -m scratch_ddp refresh')",
}


class MovedModule(ModuleType):
    """Stands for an old module: looks a name up in the new places when it is first asked for, and warns."""

    def __getattr__(self, name: str) -> Any:
        old = _without_package(self.__name__)
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        for place in PLACES[old]:
            value = getattr(importlib.import_module(PACKAGE + place), name, self)
            if not isinstance(value, ModuleType):
                _warn(f"{self.__name__}.{name}", PACKAGE + place)
                setattr(self, name, value)  # so it warns once
                return value
        raise AttributeError(f"{self.__name__} was moved to {PACKAGE}{place}, which has no {name!r}")


class OldNames:
    """Finds the modules of the table for Python's import system, and loads them."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        old = _without_package(fullname)
        if old in PLACES:
            return ModuleSpec(fullname, self, is_package=any(each.startswith(f"{old}.") for each in PLACES))
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return MovedModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to run."""

    def get_code(self, fullname: str) -> CodeType:
        """For `python -m`."""
        old = _without_package(fullname)
        return compile(COMMANDS.get(old, f"import {PACKAGE}{PLACES[old][0]}"), fullname, "exec")


def install() -> None:
    """Make the old names importable. They are looked for last, so they hide nothing."""
    if not any(isinstance(finder, OldNames) for finder in sys.meta_path):
        sys.meta_path.append(OldNames())


def _without_package(fullname: str) -> str | None:
    return fullname[len(PACKAGE) :] if fullname.startswith(PACKAGE) else None


def _warn(old: str, place: str) -> None:
    # The caller's caller: frames of the import system between them are left out by `warnings` itself.
    message = f"{old} has moved: from {place} import {old.split('.')[-1]}. The old name goes with the next release."
    warnings.warn(message, FutureWarning, stacklevel=3)
