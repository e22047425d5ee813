"""What a rank changes in libraries, so that what people write anyway does in a cell what they mean.

Progress bars are text that names its rank, also those of `tqdm.notebook`, whose widgets no frontend reaches. A script
for torchrun, pasted or run by %dist_run, finds its process group made. `%timeit` with a collective needs `-n`.
"""

import functools
import importlib.abc
import importlib.machinery
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch.distributed as dist

from scratch_ddp.cells.rank import interruptible_group

_running_script = False
_TQDM = "tqdm.notebook"
_HAS_ITS_GROUP = "(a rank has its process group already, and keeps it: {} does nothing here)"
NO_EVENT_LOOP = ": in rank cells there is one only while a cell awaits: await the task, or use asyncio.run"
_OWN_CLOCK = (
    "%timeit chooses by each rank's own clock how often it runs the code, so the ranks would not call equally often. "
    "Say how often: %timeit -n 20 -r 3"
)


def adapt_bars(rank: int) -> None:
    """A bar without a description of its own gets the rank's name (tqdm reads the variable when it is imported)."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "tqdm"]:
        del sys.modules[name]
    sys.meta_path.insert(0, _TextInstead())
    os.environ.setdefault("TQDM_DESC", f"rank {rank}")


class _TextInstead(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """`from tqdm.notebook import tqdm, trange` gives those of `tqdm`."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self) if name == _TQDM else None

    def exec_module(self, module: ModuleType) -> None:
        from tqdm.std import tqdm, trange

        module.tqdm = module.tqdm_notebook = tqdm
        module.trange = module.tnrange = trange


def adapt_process_group() -> None:
    """Let calls that would make or destroy the default process group do nothing but say so, and compare new groups.

    torch numbers groups by counting, and ranks that have counted differently wait for each other for ever.
    """
    destroy, new_group = dist.destroy_process_group, dist.distributed_c10d._new_group_with_tag

    @functools.wraps(dist.init_process_group)
    def init_process_group(*_: Any, **__: Any) -> None:
        _say(_HAS_ITS_GROUP.format("init_process_group"))

    @functools.wraps(destroy)
    def destroy_process_group(group: dist.ProcessGroup | None = None) -> None:
        if group in (None, dist.group.WORLD):
            _say(_HAS_ITS_GROUP.format("destroy_process_group"))
        else:
            destroy(group)

    def new_group_with_tag(ranks: list[int] | None = None, *args: Any, **kwargs: Any) -> dist.ProcessGroup:
        if not kwargs.get("use_local_synchronization"):
            interruptible_group.announce_new_group(ranks)
        return new_group(ranks, *args, **kwargs)

    dist.init_process_group, dist.destroy_process_group = init_process_group, destroy_process_group
    dist.distributed_c10d._new_group_with_tag = new_group_with_tag  # what `new_group` is for all kinds of groups


def _say(text: str) -> None:
    if not _running_script:
        print(text, file=sys.stderr)


def run_script(path: str, arguments: Sequence[str]) -> None:
    """Run a file as `__main__`. sys.argv, sys.path and `__main__` are put back afterwards."""
    global _running_script
    before = sys.argv, sys.path[:], sys.modules["__main__"]
    module = ModuleType("__main__")
    module.__file__ = path
    try:
        _running_script = True
        sys.argv, sys.modules["__main__"] = [path, *arguments], module
        sys.path.insert(0, str(Path(path).parent))
        exec(compile(Path(path).read_bytes(), path, "exec"), module.__dict__)
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
    finally:
        _running_script = False
        sys.argv, sys.path[:], sys.modules["__main__"] = before


def adapt_timeit(shell: Any) -> None:
    """Let %timeit and %%timeit refuse collectives, unless the number of loops is given."""
    plain = shell.find_line_magic("timeit")

    def refuse(call: dict[str, Any]) -> None:
        raise RuntimeError(_OWN_CLOCK)

    @functools.wraps(plain)
    def timeit(line: str = "", cell: str | None = None, local_ns: Any = None) -> Any:
        if re.match(r"\s*(-\w+[ =]?\S*\s+)*-n", line):
            return plain(line, cell, local_ns)
        interruptible_group.observers.append(refuse)
        try:
            return plain(line, cell, local_ns)
        finally:
            interruptible_group.observers.remove(refuse)

    for kind in ("line", "cell"):
        shell.magics_manager.magics[kind]["timeit"] = timeit
