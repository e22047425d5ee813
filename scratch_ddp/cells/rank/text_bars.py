"""Progress bars on ranks: text that names its rank, also for `tqdm.notebook`, whose widgets no frontend reaches."""

import importlib.abc
import importlib.machinery
import os
import sys
from types import ModuleType
from typing import Any

_NAME = "tqdm.notebook"


class _TextInstead(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """`from tqdm.notebook import tqdm, trange` gives those of `tqdm`."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self) if name == _NAME else None

    def exec_module(self, module: ModuleType) -> None:
        from tqdm.std import tqdm, trange

        module.tqdm = module.tqdm_notebook = tqdm
        module.trange = module.tnrange = trange


def install(rank: int) -> None:
    """A bar without a description of its own gets the rank's name (tqdm reads the variable when it is imported)."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "tqdm"]:
        del sys.modules[name]
    sys.meta_path.insert(0, _TextInstead())
    os.environ.setdefault("TQDM_DESC", f"rank {rank}")
