"""The state of a run, model and optimizer, as tensors for a checkpoint that any number of ranks can read.

Of a model that is whole on every rank, one rank writes each tensor. A sharded optimizer's state and an FSDP model's
parameters are written by the ranks that hold them.
"""

from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from scratch_ddp.common import checkpoint
from scratch_ddp.common.agreement import raise_everywhere
from scratch_ddp.fsdp import FSDP
from scratch_ddp.zero import ShardedOptimizer
from scratch_ddp.zero import checkpoint as numbered

MODEL = "model."  # what the names of the model's tensors begin with


def collect(model: nn.Module, optimizer: Optimizer, extra: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the state's tensors by name, and all that is not a tensor. The tensors share the state's memory."""
    if isinstance(model, FSDP):
        return model.collect_checkpoint(optimizer, extra)
    state = optimizer.state_dict()
    tensors = {MODEL + name: tensor for name, tensor in _inner(model).state_dict().items()}
    for number, entry in state["state"].items():
        tensors |= {f"{numbered.PREFIX}{number}.{key}": value for key, value in entry.items()}
    return tensors, {numbered.GROUPS: state["param_groups"], "extra": extra}


def read_extra(folder: Path) -> Any:
    """Return the `extra` of a checkpoint. Every rank calls it. Raises ValueError on every rank if there is none."""
    place, metadata = checkpoint.read_metadata(folder, None)
    extra = checkpoint.read_others(place, metadata, None).get("extra")
    if extra is None:
        raise ValueError(f"{folder} is not a run's checkpoint")
    return extra


def restore(folder: Path, model: nn.Module, optimizer: Optimizer) -> None:
    """Load what was written of `collect`, on any number of ranks. Every rank calls it.

    Raises ValueError on every rank if a file can't be read or is another model's; what was loaded is then unusable.
    """
    if isinstance(model, FSDP):
        model.load(folder, optimizer)
        return
    place, metadata = checkpoint.read_metadata(folder, None)
    mine = {MODEL + name: tensor for name, tensor in _inner(model).state_dict().items()}
    saved = {name: entry.size for name, entry in metadata.state_dict_metadata.items() if name.startswith(MODEL)}
    fits = saved == {name: tensor.shape for name, tensor in mine.items()}
    raise_everywhere(None if fits else f"{folder} holds another model's tensors", None)
    checkpoint.read(place, mine, None)
    if isinstance(optimizer, ShardedOptimizer):
        optimizer.load(folder)
    else:
        everything = range(sum(len(group["params"]) for group in optimizer.param_groups))
        optimizer.load_state_dict(numbered.load(folder, everything, None))


def family(model: nn.Module) -> str:
    """Which checkpoints fit the model: those of "fsdp", or those of all other strategies, "replicas"."""
    return "fsdp" if isinstance(model, FSDP) else "replicas"


def _inner(model: nn.Module) -> nn.Module:
    """The model inside a strategy's wrapper, or the model itself."""
    wrapped = getattr(model, "module", model)
    return wrapped if isinstance(wrapped, nn.Module) else model
