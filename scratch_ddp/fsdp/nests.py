"""Tensors inside of what modules take and return: tuples, lists, dicts and objects, however nested."""

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten


def with_tensors(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Return the value with its tensors changed, also those in tuples, lists and dicts.

    What holds no tensor that changes stays the same object: a cache that a model writes to must be the caller's own.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if not isinstance(value, (tuple, list, dict)):
        return value
    parts, kind = tree_flatten(value, is_leaf=lambda each: each is not value)
    if parts and parts[0] is value:  # a class of its own, which torch can't take apart
        return value
    changed = [with_tensors(change, each) for each in parts]
    return tree_unflatten(changed, kind) if any(map(operator.is_not, changed, parts)) else value


def tensors_in(value: Any, seen: set[int] | None = None) -> Iterator[torch.Tensor]:
    """All tensors in a value: also in the attributes of objects that torch's pytree does not know."""
    seen = set() if seen is None else seen  # objects
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif id(leaf) not in seen and not isinstance(leaf, (nn.Module, type)):
            seen.add(id(leaf))
            yield from tensors_in(object.__getstate__(leaf), seen)


def base_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that it is a view of, or itself."""
    return tensor if tensor._base is None else tensor._base
