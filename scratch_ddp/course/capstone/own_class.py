"""A learner's `my_ddp.py`: loads it, and says what it lacks or borrows."""

import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType

from torch import nn

from scratch_ddp.course.capstone import places

NAME = "MyDDP"


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("my_ddp", path)
    module = sys.modules["my_ddp"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def problem_of(path: Path) -> str:
    """Why the file holds no class to judge, or ""."""
    try:
        found = getattr(load(path), NAME, None)
    except BaseException as error:
        return f"{path.name} can't be imported: {places.in_words(path, error)}"
    if found is None:
        return f"{path.name} defines no class {NAME} yet"
    if not (inspect.isclass(found) and issubclass(found, nn.Module)):
        return f"{NAME} is not a class that inherits from torch.nn.Module"
    missing = [name for name in ("forward", "no_sync", "sync_gradients") if name not in dir_of(found)]
    return f"{NAME} has no {missing[0]}()" if missing else ""


def dir_of(found: type) -> set[str]:
    """The names that a class and its bases define, without those of nn.Module."""
    return {name for base in found.__mro__ if base not in (nn.Module, object) for name in vars(base)}


def borrowed_by(path: Path) -> str:
    """Say what the file uses that does the work for it, or ""."""
    module = load(path)
    for name, used in [*vars(module).items(), *((base.__name__, base) for base in module.MyDDP.__mro__)]:
        home = used.__name__ if inspect.ismodule(used) else getattr(used, "__module__", None) or ""
        if home.split(".")[0] == "scratch_ddp" or home.startswith("torch.nn.parallel"):
            return f"{path.name} uses {name} of {home}"
    if "DistributedDataParallel" in path.read_text():
        return f"{path.name} uses torch's DistributedDataParallel"
    return ""
