"""Values of the reference and of an answer side by side: copies of them, and how they differ, in words."""

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

_SHOWN = 8  # elements of a tensor
_SHORT = 60  # characters of two lists that are shown whole


class Tensors(dict):
    """What a module holds: its parameters, their gradients and its buffers, by their names in a complaint."""


class Words(str):
    """Text that a `use` yields in place of a value, shown as it is: "the gradient of rank 2's tensor"."""


def copied(value: Any) -> Any:
    """A copy on the CPU that later changes don't reach. Modules become Tensors, tuples lists."""
    if isinstance(value, torch.Tensor):
        if value.numel() and not value.untyped_storage().nbytes():  # a clone would end the process
            return Words("without memory")
        return value.detach().cpu().clone()
    if isinstance(value, nn.Module):
        found = {f"'{name}'": each for name, each in [*value.named_parameters(), *value.named_buffers()]}
        found |= {f"the gradient of '{name}'": each.grad for name, each in value.named_parameters()}
        return Tensors({name: copied(each) for name, each in found.items()})
    if isinstance(value, dict):
        return {key: copied(each) for key, each in value.items()}
    return [copied(each) for each in value] if isinstance(value, (list, tuple)) else value


def digest(value: Any) -> str:
    """Of a copy: what ranks compare to see whether they hold the same bits. 0.0 and -0.0 pass for the same."""

    def plain(each: Any) -> Any:
        if isinstance(each, torch.Tensor):
            return str(each.dtype), (each if each.dtype == torch.bool else each + 0).tolist()
        if isinstance(each, dict):
            return [(key, plain(one)) for key, one in each.items()]
        return [plain(one) for one in each] if isinstance(each, list) else each

    return hashlib.sha256(repr(plain(value)).encode()).hexdigest()


def difference(what: str, actual: Any, expected: Any, close: float = 0.0) -> str:
    """How `actual` differs from `expected`, as in `the result[1] is 3, should be 4`; "" if it does not.

    close: how far numbers may be off, relative to the largest expected one. NaN only equals NaN. An int will do for a
    float. Both are copies made with `copied`.
    """
    if isinstance(expected, dict) and isinstance(actual, dict) and actual.keys() == expected.keys():
        of = "{}: {}" if isinstance(expected, Tensors) else "{}[{!r}]"  # `step 0: the gradient of 'w'`
        found = (difference(of.format(what, key), actual[key], each, close) for key, each in expected.items())
        return next(filter(None, found), "")
    if isinstance(expected, list) and isinstance(actual, list):
        return _difference_of_lists(what, actual, expected, close)
    if isinstance(expected, torch.Tensor) and isinstance(actual, torch.Tensor):
        return _difference_of_tensors(what, actual, expected, close)
    alike = type(actual) is type(expected)
    same = alike and (actual == expected or (actual != actual and expected != expected))  # NaN
    if isinstance(expected, float) and isinstance(actual, (int, float)) and not isinstance(actual, bool):
        alike, same = True, same or actual == expected or abs(actual - expected) <= close * abs(expected)
    if alike or actual is None or expected is None or isinstance(expected, Words):
        return "" if same else f"{what} is {shown(actual)}, should be {shown(expected)}"
    kinds = type(actual).__name__, type(expected).__name__
    return f"{what} is {shown(actual)} ({kinds[0]}), should be {shown(expected)} ({kinds[1]})"


def _difference_of_lists(what: str, actual: list, expected: list, close: float) -> str:
    """Short ones are shown whole."""
    if len(actual) == len(expected):
        pairs = enumerate(zip(actual, expected, strict=True))
        text = next(filter(None, (difference(f"{what}[{i}]", *pair, close) for i, pair in pairs)), "")
    else:
        text = f"{what} has {len(actual)} {'entry' if len(actual) == 1 else 'entries'}, should have {len(expected)}"
    both = f"{what} is {actual}, should be {expected}"
    return both if text and len(both) <= len(what) + _SHORT and "tensor(" not in both else text


def _difference_of_tensors(what: str, actual: torch.Tensor, expected: torch.Tensor, close: float) -> str:
    if actual.shape != expected.shape:
        return f"{what} has shape {tuple(actual.shape)}, should have {tuple(expected.shape)}"
    if actual.dtype != expected.dtype:
        dtypes = [str(each.dtype).removeprefix("torch.") for each in (actual, expected)]
        return f"{what} has dtype {dtypes[0]}, should have {dtypes[1]}"
    near = actual == expected
    if expected.is_floating_point() or expected.is_complex():
        largest = max(expected[expected.isfinite()].abs().tolist(), default=0.0)
        near |= ((actual - expected).abs() <= close * largest) | (actual.isnan() & expected.isnan())
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


def ranks(numbers: Iterable[int]) -> str:
    """`Rank 2`, `Ranks 0 and 3`, `Ranks 0, 1 and 3`."""
    *others, last = sorted(numbers)
    return f"Ranks {', '.join(map(str, others))} and {last}" if others else f"Rank {last}"


def times(number: int) -> str:
    """`once`, `twice`, `3 times`."""
    return {1: "once", 2: "twice"}.get(number, f"{number:,} times")
