"""Checkpoints in a folder: each rank writes its own shards, and any number of ranks can read them.

The folder always holds a complete checkpoint. A new one is written beside it and takes its place at the end, so a save
that is interrupted leaves the old one intact.
"""

import contextlib
import copy
import os
import shutil
import zlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from scratch_ddp.common.agreement import raise_everywhere

METADATA = ".metadata"  # torch's file that says what the others hold
CHECKSUM = ".crc32"  # what follows a file's name in the name of the file with its checksum
OTHERS = "others"  # the name of all that is not a tensor


def write(folder: str | os.PathLike, state: dict[str, Any], others: Any, group: dist.ProcessGroup | None) -> None:
    """Write tensors to a folder, and the first rank's `others`: anything that torch.save takes. Every rank calls it.

    A tensor that is not a DTensor is the same on every rank, and one rank writes it. Raises OSError on every rank if
    the folder can't be written; it then still holds what it held before.
    """
    Write(folder, state, others, group).finish()


class Write:
    """A checkpoint that is being written: as `write`, which is complete when `finish` has returned.

    With `background`, a thread writes a copy of the state, and checksums for `verify`. The caller may change the
    tensors meanwhile. The threads of several ranks need a process group of their own, `messages`, with a backend for
    main memory.
    """

    def __init__(
        self,
        folder: str | os.PathLike,
        state: dict[str, Any],
        others: Any,
        group: dist.ProcessGroup | None,
        background: bool = False,
        messages: dist.ProcessGroup | None = None,
    ):
        self.folder, self.group = Path(folder), group
        self.partial = self.folder.with_name(self.folder.name + ".partial")
        self._future: Future | None = None
        with _refused_everywhere(OSError, group):
            if is_first(group):
                _prepare(self.folder, self.partial)
        state = state | ({OTHERS: others} if is_first(group) else {})
        with self._refused_everywhere():
            if background:  # torch's own async_save can't copy our DTensors
                state = {name: _copy(value) for name, value in state.items()}
                self._future = ThreadPoolExecutor(1).submit(_save_with_checksums, state, self.partial, messages)
            else:
                _save(state, self.partial, group)

    @property
    def has_ended(self) -> bool:
        """Whether `finish` need not wait for this rank's thread."""
        return self._future is None or self._future.done()

    def finish(self) -> None:
        """Wait for this rank's thread, then let the checkpoint take its place. Every rank calls it."""
        with self._refused_everywhere():
            if self._future is not None:
                self._future.result()
        with _refused_everywhere(OSError, self.group):
            if is_first(self.group):
                _put_in_place(self.partial, self.folder)

    def _refused_everywhere(self) -> contextlib.AbstractContextManager:
        return _refused_everywhere(OSError, self.group, f"{self.folder} can't be written")


def verify(folder: Path, group: dist.ProcessGroup | None) -> None:
    """Read all files, shared out over the ranks. Raises ValueError on every rank if one is not what was written."""
    me, ranks = (dist.get_rank(group), dist.get_world_size(group)) if dist.is_initialized() else (0, 1)
    with _refused_everywhere(ValueError, group, f"{folder} can't be verified"):
        for path in [folder / METADATA, *sorted(folder.glob("*.distcp"))][me::ranks]:
            if path.with_name(path.name + CHECKSUM).read_text() != _checksum(path):
                raise ValueError(f"{path} is damaged: its checksum is another one")


def read_metadata(folder: str | os.PathLike, group: dist.ProcessGroup | None) -> tuple[Path, Metadata]:
    """Return where a checkpoint is, and its metadata. Raises ValueError on every rank if it is incomplete."""
    folder = Path(folder)
    if not folder.exists() and _before(folder).exists():  # a save was interrupted while it replaced this one
        folder = _before(folder)
    metadata = problem = None
    try:
        metadata = dcp.FileSystemReader(folder).read_metadata()
        problem = _missing(folder, metadata)
    except FileNotFoundError:
        problem = f"{folder} holds no checkpoint, or one that was cut short: it has no .metadata"
    except Exception as error:
        problem = f"{folder} holds a checkpoint that was cut short: .metadata can't be read ({error})"
    raise_everywhere(problem, group)
    return folder, metadata


def read(folder: Path, state: dict[str, Any], group: dist.ProcessGroup | None) -> None:
    """Fill the tensors of `state`; of a DTensor, this rank's rows. Raises ValueError on every rank if it fails."""
    with _refused_everywhere(ValueError, group, f"{folder} can't be read; what has been loaded of it is unusable"):
        planner = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        alone = not dist.is_initialized()
        dcp.load(state, checkpoint_id=folder, planner=planner, process_group=group, no_dist=alone)


def read_others(folder: Path, metadata: Metadata, group: dist.ProcessGroup | None) -> Any:
    """Return the `others` that were written: everything that is not a tensor."""
    state = {OTHERS: None}
    read(folder, state, group)
    return state[OTHERS]


def is_first(group: dist.ProcessGroup | None) -> bool:
    """Whether this is the group's first rank, or the only process."""
    return not dist.is_initialized() or dist.get_rank(group) == 0


@contextlib.contextmanager
def _refused_everywhere(error: type[Exception], group: dist.ProcessGroup | None, what: str = "") -> Iterator[None]:
    """Raise `error` on every rank if the block raises on any. Every rank calls it."""
    problem = None
    try:
        yield
    except (Exception, CheckpointException) as raised:
        failures = list(getattr(raised, "failures", {}).values())  # those of all ranks, with their tracebacks
        cause = failures[0][0] if failures else raised
        problem = ": ".join(filter(None, [what, type(cause).__name__ if what else "", str(cause).partition("\n")[0]]))
    raise_everywhere(problem, group, error)


def _save(state: dict[str, Any], folder: Path, group: dist.ProcessGroup | None) -> None:
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)  # lists stay whole
    dcp.save(state, checkpoint_id=folder, planner=planner, process_group=group, no_dist=not dist.is_initialized())


def _save_with_checksums(state: dict[str, Any], folder: Path, group: dist.ProcessGroup | None) -> None:
    """Save, and write a checksum beside each of this rank's files: torch would read flipped bits as they are."""
    _save(state, folder, group)
    rank = dist.get_rank(group) if dist.is_initialized() else 0
    for path in [*folder.glob(f"__{rank}_*.distcp"), *([folder / METADATA] if rank == 0 else [])]:
        path.with_name(path.name + CHECKSUM).write_text(_checksum(path))


def _copy(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def _prepare(folder: Path, partial: Path) -> None:
    """Make an empty folder for the new checkpoint. Only checkpoints are ever removed."""
    for place in (folder, partial, _before(folder)):
        if place.exists() and not (place.is_dir() and all(_is_ours(each) for each in place.iterdir())):
            raise FileExistsError(f"{place} exists and is not a checkpoint: choose a folder used for nothing else")
    shutil.rmtree(partial, ignore_errors=True)  # left by an interrupted save
    partial.mkdir(parents=True)


def _put_in_place(partial: Path, folder: Path) -> None:
    """Replace the old checkpoint by the new one. In between, the old one still exists beside it."""
    before = _before(folder)
    if folder.exists():
        shutil.rmtree(before, ignore_errors=True)
        os.rename(folder, before)
    os.rename(partial, folder)
    shutil.rmtree(before, ignore_errors=True)


def _before(folder: Path) -> Path:
    return folder.with_name(folder.name + ".before")


def _is_ours(path: Path) -> bool:
    return path.name == METADATA or path.suffix in (".distcp", ".tmp", CHECKSUM)


def _missing(folder: Path, metadata: Metadata) -> str | None:
    """Say what the metadata lists and the files lack, or return None."""
    if OTHERS not in metadata.state_dict_metadata:
        return f"{folder} holds a checkpoint that was not written by save()"
    for place in metadata.storage_data.values():
        path, end = folder / place.relative_path, place.offset + place.length
        size = path.stat().st_size if path.exists() else 0
        if size < end:
            return f"{folder} holds a checkpoint that was cut short: {path.name} has {size} bytes, {end} were written"
    return None


def _checksum(path: Path) -> str:
    value = 0
    with open(path, "rb") as file:
        while part := file.read(2**20):
            value = zlib.crc32(part, value)
    return f"{value:08x}"
