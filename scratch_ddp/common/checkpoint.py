"""Checkpoints in a folder: each rank writes its own shards, and any number of ranks can read them.

The folder always holds a complete checkpoint. A new one is written beside it and takes its place at the end, so a save
that is interrupted leaves the old one intact.
"""

import os
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

from scratch_ddp.common.agreement import raise_everywhere, together

METADATA = ".metadata"  # torch's file that says what the others hold
OTHERS = "others"  # the name of all that is not a tensor


def write(folder: str | os.PathLike, state: dict[str, Any], others: Any, group: dist.ProcessGroup | None) -> None:
    """Write tensors to a folder, and the first rank's `others`: anything that torch.save takes. Every rank calls it.

    A tensor that is not a DTensor is the same on every rank, and one rank writes it. Raises OSError on every rank if
    the folder can't be written; it then still holds what it held before.
    """
    folder = Path(folder)
    partial = folder.with_name(folder.name + ".partial")
    is_first = dist.get_rank(group) == 0
    with together(group, OSError):
        if is_first:
            _prepare(folder, partial)
    state = state | ({OTHERS: others} if is_first else {})
    with together(group, OSError, f"{folder} can't be written"):
        planner = dcp.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)  # lists stay whole
        dcp.save(state, checkpoint_id=partial, planner=planner, process_group=group)
    with together(group, OSError):
        if is_first:
            _put_in_place(partial, folder)


def read_metadata(folder: str | os.PathLike, group: dist.ProcessGroup | None) -> tuple[Path, Metadata]:
    """Return where a checkpoint is, and its metadata.

    Raises FileNotFoundError on every rank if there is none, ValueError if it is incomplete.
    """
    folder = Path(folder)
    if not folder.exists() and _before(folder).exists():  # a save was interrupted while it replaced this one
        folder = _before(folder)
    raise_everywhere(None if folder.exists() else f"{folder} holds no checkpoint", group, FileNotFoundError)
    with together(group, what=f"{folder} holds no checkpoint, or one that was cut short"):
        metadata = dcp.FileSystemReader(folder).read_metadata()
        _check_complete(folder, metadata)
    return folder, metadata


def read(folder: Path, state: dict[str, Any], group: dist.ProcessGroup | None) -> None:
    """Fill the tensors of `state`; of a DTensor, this rank's rows. Raises ValueError on every rank if it fails."""
    with together(group, what=f"{folder} can't be read; what has been loaded of it is unusable"):
        planner = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        dcp.load(state, checkpoint_id=folder, planner=planner, process_group=group)


def read_others(folder: Path, group: dist.ProcessGroup | None) -> Any:
    """Return the `others` that were written: everything that is not a tensor."""
    state = {OTHERS: None}
    read(folder, state, group)
    return state[OTHERS]


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
    return path.name == METADATA or path.suffix in (".distcp", ".tmp")


def _check_complete(folder: Path, metadata: Metadata) -> None:
    """Raise ValueError if the metadata lists what the files lack."""
    if OTHERS not in metadata.state_dict_metadata:
        raise ValueError("it was not written by save()")
    for place in metadata.storage_data.values():
        path, end = folder / place.relative_path, place.offset + place.length
        if (size := path.stat().st_size) < end:
            raise ValueError(f"{path.name} has {size} bytes, {end} were written")
