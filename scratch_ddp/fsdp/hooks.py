"""Hooks that tell `Passes` where the wrapped model is: before and after each unit's forward and backward.

Before a unit's backward means: the gradient of one of its outputs is known. After it: the gradients of all its inputs
are known, so nothing in it is left to compute. A unit none of whose inputs needs a gradient is through when the whole
backward pass is. A unit's outputs are found in tuples, lists, mappings and dataclasses, however nested.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils.hooks import RemovableHandle

from scratch_ddp.fsdp.runtime import Passes
from scratch_ddp.fsdp.units import Unit


def install(passes: Passes, compute_dtype: torch.dtype | None) -> list[RemovableHandle]:
    """Put the hooks on the root's module and on the units'; return the handles that take them off again."""
    handles = []
    for unit in [passes.root, *passes.units]:
        before = functools.partial(_before_forward, passes, unit, compute_dtype)
        after = functools.partial(_after_forward, passes, unit)
        handles.append(unit.module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
        # After an exception in the model, its forward goes to its end as well: other ranks may have none.
        handles.append(unit.module.register_forward_hook(after, always_call=unit is passes.root))
        for parameter in filter(lambda each: each.requires_grad, unit.parameters()):
            handles.append(parameter.register_post_accumulate_grad_hook(lambda _: passes.schedule.tidy()))
    return handles


def _before_forward(
    passes: Passes, unit: Unit, compute_dtype: torch.dtype | None, module: nn.Module, args: tuple, kwargs: dict
) -> tuple[tuple, dict]:
    if unit is passes.root:
        passes.begin_forward()
    else:
        passes.before_forward(unit)
    if compute_dtype is not None:
        args, kwargs = _changed((args, kwargs), lambda tensor: _cast(tensor, compute_dtype))
    if unit is not passes.root and torch.is_grad_enabled():
        args, kwargs = _watch_inputs(args, kwargs, lambda _: passes.after_backward(unit))
    return args, kwargs


def _after_forward(passes: Passes, unit: Unit, module: nn.Module, args: tuple, output: Any) -> None:
    graph = passes.graph
    for tensor in _tensors(output):
        if tensor.requires_grad:
            tensor.register_hook(lambda _: passes.before_backward(unit, graph))
    if unit is passes.root:
        passes.end_forward()
    else:
        passes.after_forward(unit)


def _watch_inputs(args: tuple, kwargs: dict, through: Callable[[Any], None]) -> tuple[tuple, dict]:
    """Return the inputs, with `through` called in backward once the gradients of all of them are known.

    The unit gets views: of a tensor that others use too, only what comes through this unit is waited for.
    """
    watched: list[torch.Tensor] = []

    def watch(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.requires_grad:
            return tensor
        watched.append(tensor.view_as(tensor))
        return watched[-1]

    args, kwargs = _changed((args, kwargs), watch)
    if watched:
        register_multi_grad_hook(watched, through)
    return args, kwargs


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _changed(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same nest of tuples, lists and dicts, its tensors changed. Other objects are left as they are: a cache that
    the model writes to must stay the caller's own."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) in (tuple, list):
        return type(value)(_changed(each, change) for each in value)
    if type(value) is dict:
        return {key: _changed(each, change) for key, each in value.items()}
    return value


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in a nest of tuples, lists, mappings and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, Mapping):
        yield from _tensors(list(value.values()))
    elif dataclasses.is_dataclass(value):
        yield from _tensors([getattr(value, field.name) for field in dataclasses.fields(value)])
