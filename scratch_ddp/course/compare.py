"""Values of the reference and of an answer side by side: copies of them, and how they differ, in words."""

import hashlib
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

_SHOWN = 8  # elements of a tensor
_SHORT = 60  # characters of two lists that are shown whole


class Words(str):
    """Text that a `use` yields in place of a value, shown as it is: "the gradient of rank 2's tensor"."""


def parts(value: Any) -> dict[str, Any]:
    """What is compared one by one: of a module or list its parameters, buffers, gradients; else the whole, named ""."""
    if isinstance(value, list) and value and all(isinstance(each, nn.Parameter) for each in value):
        value = nn.ParameterList(value)
    if not isinstance(value, nn.Module):
        return {"": value}
    found = {f"'{name}'": each for name, each in [*value.named_parameters(), *value.named_buffers()]}
    return found | {f"the gradient of '{name}'": each.grad for name, each in value.named_parameters()}


def copied(value: Any) -> Any:
    """A copy on the CPU that later changes don't reach. Tuples become lists."""
    if isinstance(value, torch.Tensor):
        if value.numel() and not value.untyped_storage().nbytes():  # a clone would end the process
            return Words("without memory")
        return value.detach().cpu().clone()
    if isinstance(value, dict):
        return {key: copied(each) for key, each in value.items()}
    return [copied(each) for each in value] if isinstance(value, (list, tuple)) else value


def digest(value: Any) -> str:
    """Of a copy: what ranks compare to see whether they hold the same bits. 0.0 and -0.0 pass for the same."""
    found = hashlib.sha256()
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            found.update((leaf + 0).flatten().view(torch.uint8).numpy())
            leaf = leaf.dtype, leaf.shape
        found.update(repr(leaf).encode())
    return found.hexdigest()


def difference(what: str, actual: Any, expected: Any, close: float = 0.0) -> str:
    """How `actual` differs from `expected`, as in `the result[1] is 3, should be 4`; "" if it does not.

    close: how far numbers may be off, relative to the largest expected one. NaN only equals NaN. An int will do for a
    float, a tensor without dimensions for a number. Both are copies made with `copied`.
    """
    kind = type(expected)
    if kind in (bool, int, float) and isinstance(actual, torch.Tensor) and not actual.dim():
        actual = actual.item()
    if isinstance(expected, torch.Tensor) and isinstance(actual, torch.Tensor):
        return _difference_of_tensors(what, actual, expected, close)
    if kind in (list, dict) and type(actual) is kind:
        return _difference_inside(what, actual, expected, close)
    alike = type(actual) is kind or (kind is float and type(actual) is int)
    if alike and (actual == expected or (actual != actual and expected != expected)):  # NaN
        return ""
    if alike and kind is float and abs(actual - expected) <= close * abs(expected):
        return ""
    if alike or None in (actual, expected) or kind is Words:
        return f"{what} is {shown(actual)}, should be {shown(expected)}"
    return f"{what} is {shown(actual)} ({type(actual).__name__}), should be {shown(expected)} ({kind.__name__})"


def _difference_inside(what: str, actual: Any, expected: Any, close: float) -> str:
    """Of lists and dicts: short ones are shown whole."""
    mine, right = (dict(enumerate(each)) if isinstance(each, list) else each for each in (actual, expected))
    text = f"{what} has {len(mine)} entr{'y' if len(mine) == 1 else 'ies'}, should have {len(right)}"
    if mine.keys() == right.keys():
        found = (difference(f"{what}[{key!r}]", mine[key], each, close) for key, each in right.items())
        text = next(filter(None, found), "")
    both = f"{what} is {actual}, should be {expected}" if text else ""
    return both if len(both) <= len(what) + _SHORT and "tensor(" not in both else text


def _difference_of_tensors(what: str, actual: torch.Tensor, expected: torch.Tensor, close: float) -> str:
    if actual.shape != expected.shape:
        return f"{what} has shape {tuple(actual.shape)}, should have {tuple(expected.shape)}"
    if actual.dtype != expected.dtype:
        return f"{what} has dtype {actual.dtype}, should have {expected.dtype}"
    largest = max(expected[expected.isfinite()].abs().tolist(), default=0.0) if expected.is_floating_point() else 0.0
    near = torch.isclose(actual, expected, rtol=0.0, atol=close * largest, equal_nan=True)
    wrong = (~near).flatten().nonzero().flatten().tolist()
    if not wrong:
        return ""
    if near.numel() > _SHOWN:
        what += f" is wrong in {len(wrong):,} of {near.numel():,} elements: element {wrong[0]}"
        actual, expected = actual.flatten()[wrong[0]], expected.flatten()[wrong[0]]
    exact = shown(actual) == shown(expected)
    return f"{what} is {shown(actual, exact)}, should be {shown(expected, exact)}"


def shown(value: Any, exact: bool = False) -> str:
    """A value as it may stand in a line: tensors as their numbers, long ones cut. exact: with all digits."""
    if isinstance(value, torch.Tensor):
        numbers = [str(number) if exact else f"{number:g}" for number in value.flatten()[:_SHOWN].tolist()]
        more = ", …" if value.numel() > _SHOWN else ""
        return f"[{', '.join(numbers)}{more}]" if value.dim() else numbers[0]
    text = str(value) if isinstance(value, Words) else repr(value)
    return text if len(text) <= 80 else text[:77] + "…"


def times(number: int) -> str:
    """`once`, `twice`, `3 times`."""
    return {1: "once", 2: "twice"}.get(number, f"{number:,} times")
