"""A script for torchrun, run in a rank that has its process group already."""

import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch.distributed as dist


def run_script(path: str, arguments: Sequence[str]) -> None:
    """Run a file as `__main__`. Its calls to make and destroy the default process group do nothing: the rank has one.

    sys.argv, sys.path and `__main__` are put back afterwards.
    """
    before = sys.argv, sys.path[:], sys.modules["__main__"], dist.init_process_group, dist.destroy_process_group
    module = ModuleType("__main__")
    module.__file__ = path
    try:
        sys.argv, sys.modules["__main__"] = [path, *arguments], module
        sys.path.insert(0, str(Path(path).parent))
        dist.init_process_group = lambda *_, **__: None
        dist.destroy_process_group = lambda group=None: _destroy(group, before[-1])
        exec(compile(Path(path).read_bytes(), path, "exec"), module.__dict__)
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
    finally:
        sys.argv, sys.path[:], sys.modules["__main__"], dist.init_process_group, dist.destroy_process_group = before


def _destroy(group: dist.ProcessGroup | None, destroy: Any) -> None:
    if group not in (None, dist.group.WORLD):
        destroy(group)
