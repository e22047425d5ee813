"""Tensors inside of what modules take, keep and return: tuples, lists, dicts and objects, however nested."""

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

Changes = list[tuple[Any, Any]]  # values, and what they became


def with_tensors(change: Callable[[torch.Tensor], torch.Tensor], value: Any, changes: Changes) -> Any:
    """Return the value with its tensors changed, also those in tuples, lists and dicts; add to `changes`.

    What holds no tensor that changes stays the same object.
    """
    made = value
    if isinstance(value, torch.Tensor):
        made = change(value)
    elif isinstance(value, (tuple, list, dict)):
        parts, kind = tree_flatten(value, is_leaf=lambda each: each is not value)
        if not (parts and parts[0] is value):  # a class of its own, which torch can't take apart
            new = [with_tensors(change, each, changes) for each in parts]
            made = tree_unflatten(new, kind) if any(map(operator.is_not, new, parts)) else value
    if made is not value:
        changes.append((value, made))
    return made


def write_back(changes: Changes) -> None:
    """Do to the caller's lists and dicts, as to a cache, what a module has done to those in their place."""
    before = {id(made): value for value, made in changes}
    for value, made in changes:
        if isinstance(value, list):
            value[:] = [before.get(id(each), each) for each in made]
        elif isinstance(value, dict):
            for key in value.keys() - made.keys():
                del value[key]
            for key, each in made.items():
                value[key] = before.get(id(each), each)


def nodes_of(value: Any) -> set[Node]:
    """Where autograd comes to a value's tensors. Of a view that a caller writes to in place, it is its base alone."""
    return {node for each in tensors_in(value) for node in (each.grad_fn, base_of(each).grad_fn) if node is not None}


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
