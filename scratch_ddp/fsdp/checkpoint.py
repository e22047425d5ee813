"""The methods of `FSDP` that save and load: whole on the first rank, or in a folder to which each rank writes."""

import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.common import checkpoint
from scratch_ddp.common.agreement import check_same_lines, raise_everywhere
from scratch_ddp.fsdp import optimizer_state
from scratch_ddp.fsdp.desync import OTHERS
from scratch_ddp.fsdp.parts import Parts
from scratch_ddp.fsdp.runtime import Passes
from scratch_ddp.fsdp.sharded_state import Whole, load_sharded_state, sharded_state
from scratch_ddp.fsdp.state_dict import load_whole_state, whole_state, why_not_this_models, write_whole_state

PREFIX = "model."


class Saving:
    """A wrapper that can be saved and loaded. Every rank of its group calls each of these methods."""

    module: nn.Module
    group: dist.ProcessGroup | None
    _parts: Parts
    _passes: Passes

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Return the state dict of the whole model, in main memory, on the first rank; an empty one elsewhere.

        It is what the plain model's `state_dict()` would be, buffers and tied names included. One all-gather a unit.
        """
        self._passes.meet(OTHERS, ["full_state_dict()"])
        return whole_state(self.module, self._parts, self.group)

    def load_full_state_dict(self, state: Mapping[str, torch.Tensor] | str | os.PathLike | None = None) -> None:
        """Load the state dict of a whole model, or the file with it, that the first rank passes; others may pass None.

        Raises ValueError on every rank if it can't be read, or is of another model or dtype. One broadcast a unit.
        """
        self._passes.meet(OTHERS, ["load_full_state_dict()"])
        load_whole_state(self.module, self._parts, state, self.group)
        self._passes.checks.forget_changes()

    def save_full_state_dict(self, path: str | os.PathLike) -> None:
        """Let the first rank write `full_state_dict()` to a file, which replaces an older one when it is complete."""
        write_whole_state(path, self.full_state_dict(), self.group)

    def state_dict(self, *, destination: dict[str, Any] | None = None, prefix: str = "", **_: Any) -> dict[str, Any]:
        """Return this rank's shards as DTensors, under the model's own names, and whole what is not sharded.

        For torch.distributed.checkpoint, as of a model under `fully_shard`. The tensors share the model's memory. No
        communication.
        """
        destination = {} if destination is None else destination
        mine = sharded_state(self.module, self._parts, self.group)
        destination.update({prefix + key: value for key, value in mine.items()})
        return destination

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict()` returned on this rank of as many ranks. Raises ValueError on every rank."""
        self._passes.meet(OTHERS, ["load_state_dict()"])
        load_sharded_state(sharded_state(self.module, self._parts, self.group), state_dict, self.group)
        self._passes.checks.forget_changes()

    def save(
        self, folder: str | os.PathLike, optimizer: torch.optim.Optimizer | None = None, extra: Any = None
    ) -> None:
        """Write the model, and the optimizer's state, to a folder on a file system that all ranks share.

        Each rank writes its own shards, through torch.distributed.checkpoint. `extra`: numbers, strings, tensors, lists
        and dicts, the first rank's, that `load` returns. An older checkpoint in the folder is replaced when the new one
        is complete: whatever ends a save, one of them is there. Raises OSError or ValueError on every rank where it
        can't be done.
        """
        self._passes.meet(OTHERS, ["save()"])
        tensors = {PREFIX + key: tensor for key, tensor in sharded_state(self.module, self._parts, self.group).items()}
        described = problem = None
        if optimizer is not None:
            try:
                state, described = optimizer_state.describe(optimizer, self._parts.masters(), self._whole())
                tensors |= state
            except ValueError as error:
                problem = str(error)
        raise_everywhere(problem, self.group)
        check_same_lines(sorted(tensors), "the ranks' optimizers differ", self.group)
        checkpoint.write(folder, tensors, {"optimizer": described, "extra": extra}, self.group)

    def load(self, folder: str | os.PathLike, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """Load what `save` has written, on any number of ranks; return the `extra` of it.

        Raises ValueError on every rank if the checkpoint is of another model, dtype or optimizer, or was cut short;
        model and optimizer are then as before, unless the message says otherwise.
        """
        self._passes.meet(OTHERS, ["load()"])
        folder, metadata = checkpoint.read_metadata(folder, self.group)
        mine = {PREFIX + key: each for key, each in sharded_state(self.module, self._parts, self.group).items()}
        saved = {key: (value.size, value.properties.dtype) for key, value in metadata.state_dict_metadata.items()}
        saved_model = {key: fact for key, fact in saved.items() if key.startswith(PREFIX)}
        problem = why_not_this_models(saved_model, {key: (each.shape, each.dtype) for key, each in mine.items()})
        raise_everywhere(problem and problem.replace(repr(PREFIX)[:-1], "'"), self.group)
        others = checkpoint.read_others(folder, metadata, self.group)
        if optimizer is None:
            checkpoint.read(folder, mine, self.group)
        else:
            self._load_with_optimizer(folder, mine, optimizer, others["optimizer"], metadata.state_dict_metadata)
        self._passes.checks.forget_changes()
        self._parts.buffers.remember()
        return others["extra"]

    def _whole(self) -> Whole:
        return Whole(self._parts, self.group)

    def _load_with_optimizer(self, folder, mine, optimizer, described, saved) -> None:
        problem = states = None
        try:
            tensors, states = optimizer_state.make_room(
                optimizer, self._parts.masters(), self._whole(), described, saved
            )
            mine = mine | tensors
        except ValueError as error:
            problem = str(error)
        raise_everywhere(problem, self.group)
        checkpoint.read(folder, mine, self.group)
        optimizer_state.restore(optimizer, states, described["groups"])
