"""What one asks of a whole model with sliced layers: its parameters and gradients whole, and clipping."""

from collections.abc import Iterator

import torch
from torch import nn

from scratch_ddp.common.agreement import message_device
from scratch_ddp.common.clip_grad import clip_to_norm, total_norm
from scratch_ddp.common.wrapper import Group, process_group
from scratch_ddp.tensor_parallel.layers import ParallelLayer


def gather_full_params(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return all parameters whole, on every rank, by name; tied ones under each of their names.

    The plain model takes them with `load_state_dict`, and can then be sliced for any number of ranks. Every rank calls
    it. One all-gather for each sliced parameter.
    """
    return dict(_gather(model, gradients=False))


def gather_full_grads(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return the gradients likewise, None where there is none."""
    return dict(_gather(model, gradients=True))


def _gather(model: nn.Module, gradients: bool) -> Iterator[tuple[str, torch.Tensor | None]]:
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, ParallelLayer):
            own = module.gather_full_grads() if gradients else module.gather_full_params()
        else:
            plain = {name: each.grad if gradients else each for name, each in module._parameters.items()}
            own = {name: None if each is None else each.detach().clone() for name, each in plain.items()}
        yield from ((f"{path}.{name}".lstrip("."), each) for name, each in own.items())


def clip_grad_norm_(
    model: nn.Module,
    max_norm: float,
    norm_type: float = 2.0,
    group: Group = None,
) -> torch.Tensor:
    """Scale all gradients so that their norm is at most `max_norm`; return the norm before, a float64 scalar.

    Does what torch.nn.utils.clip_grad_norm_ does in one process, alike on every rank: slices of all ranks are counted,
    parameters that every rank holds whole once. `group`: the one that the model was sliced for. One all-reduce of 8
    bytes. Under data parallelism, call it after `sync_gradients`.
    """
    group = process_group(group)
    slices = {
        parameter: None
        for module in model.modules()
        if isinstance(module, ParallelLayer)
        for name, parameter in module.named_parameters()
        if name in module.cuts
    }
    sliced = [each.grad for each in slices if each.grad is not None]
    whole = [each.grad for each in model.parameters() if each not in slices and each.grad is not None]
    norm = total_norm(sliced, whole, norm_type, message_device(group), group)
    clip_to_norm([*sliced, *whole], norm, max_norm)
    return norm
