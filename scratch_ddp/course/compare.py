"""Values of the reference and of an answer side by side: copies of them, and how they differ, in words."""

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

_SHOWN = 8  # elements of a tensor


class Tensors(dict):
    """What a module holds: a tensor by its name in a complaint."""


class Words(str):
    """Text that a `use` yields in place of a value, shown as it is: "the gradient of rank 2's tensor"."""

    __slots__ = ()


def leaves(thing: Any, name: str) -> dict[str, Any]:
    """Copies of all tensors and other values that can be reached, each by a name that a complaint can use.

    A module's are its parameters, their gradients and its buffers. Numbers, text and None are left out where `thing` is
    nothing else: no call can change them.
    """
    if isinstance(thing, nn.Module):
        found = {f"'{key}'": copied(each) for key, each in [*thing.named_parameters(), *thing.named_buffers()]}
        grads = {f"the gradient of '{key}'": copied(each.grad) for key, each in thing.named_parameters()}
        return found | grads
    return {name: copied(thing)} if isinstance(thing, (torch.Tensor, list, dict, set)) else {}


def copied(value: Any) -> Any:
    """A copy that later changes don't reach. Modules become dicts of their tensors."""
    if isinstance(value, torch.Tensor):
        if value.numel() and not value.untyped_storage().nbytes():  # a clone would end the process
            return Words("without memory")
        return value.detach().cpu().clone()
    if isinstance(value, nn.Module):
        return Tensors(leaves(value, ""))
    if isinstance(value, dict):
        return {key: copied(each) for key, each in value.items()}
    return [copied(each) for each in value] if isinstance(value, (list, tuple)) else value


def same(one: Any, other: Any) -> bool:
    """Whether two copies hold the same bits (0.0 and -0.0 pass for the same)."""
    return digest(one) == digest(other)


def digest(value: Any) -> str:
    """What ranks compare to see whether they hold the same bits."""
    return hashlib.sha256(_bytes(value)).hexdigest()


def _bytes(value: Any) -> bytes:
    if isinstance(value, torch.Tensor):
        plain = value.detach().cpu().contiguous()
        plain = plain + 0.0 if plain.is_floating_point() else plain
        head = f"{value.dtype}{tuple(value.shape)}".encode()
        return head + plain.reshape(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(value, list):
        return b"[" + b"|".join(map(_bytes, value)) + b"]"
    if isinstance(value, dict):
        return b"{" + b"|".join(repr(key).encode() + _bytes(each) for key, each in value.items()) + b"}"
    return repr(value).encode()


def difference(what: str, actual: Any, expected: Any, close: float = 0.0) -> str:
    """How `actual` differs from `expected`, as in `the result[1] is 3, should be 4`; "" if it does not.

    close: how far numbers may be off, relative to the largest expected one. NaN only equals NaN. An int will do for a
    float. Both are copies made with `copied`.
    """
    if isinstance(expected, list) and isinstance(actual, list):
        if len(actual) != len(expected):
            return f"{what} has {_entries(len(actual))}, should have {len(expected)}"
        pairs = [(f"{what}[{i}]", *pair) for i, pair in enumerate(zip(actual, expected, strict=True))]
    elif isinstance(expected, dict) and isinstance(actual, dict):
        if actual.keys() != expected.keys():
            return f"{what} has the keys {sorted(map(str, actual))}, should have {sorted(map(str, expected))}"
        of = "{}: {}" if isinstance(expected, Tensors) else "{}[{!r}]"  # `step 0: the gradient of 'w'`
        pairs = [(of.format(what, key), actual[key], each) for key, each in expected.items()]
    elif isinstance(expected, torch.Tensor) and isinstance(actual, torch.Tensor):
        return _difference_of_tensors(what, actual, expected, close)
    else:
        equal = _alike(actual, expected) and _near(actual, expected, close)
        return "" if equal else f"{what} is {_known(actual, expected)}, should be {_known(expected, actual)}"
    return next(filter(None, (difference(*pair, close) for pair in pairs)), "")


def _entries(number: int) -> str:
    return f"{number} {'entry' if number == 1 else 'entries'}"


def _alike(actual: Any, expected: Any) -> bool:
    return type(actual) is type(expected) or (isinstance(expected, float) and type(actual) is int)


def _near(actual: Any, expected: Any, close: float) -> bool:
    if isinstance(expected, float) and actual == actual:  # not NaN
        return actual == expected or abs(actual - expected) <= close * abs(expected)
    return actual == expected or (actual != actual and expected != expected)


def _known(value: Any, beside: Any) -> str:
    """The value, and its kind where that is the difference."""
    if value is None or isinstance(value, (Words, dist.ProcessGroup)) or type(value) is type(beside) or beside is None:
        return shown(value)
    return f"{shown(value)} ({type(value).__name__})"


def _difference_of_tensors(what: str, actual: torch.Tensor, expected: torch.Tensor, close: float) -> str:
    if actual.shape != expected.shape:
        return f"{what} has shape {tuple(actual.shape)}, should have {tuple(expected.shape)}"
    if actual.dtype != expected.dtype:
        return f"{what} has dtype {_dtype(actual)}, should have {_dtype(expected)}"
    near = actual == expected
    if close and expected.numel():
        finite = expected[expected.isfinite()]
        near |= (actual - expected).abs() <= close * (finite.abs().max() if finite.numel() else 0)
    if expected.is_floating_point() or expected.is_complex():
        near |= actual.isnan() & expected.isnan()
    wrong = ~near.flatten()
    if not wrong.any():
        return ""
    if len(wrong) <= _SHOWN:
        return f"{what} {_is_should_be(actual, expected)}"
    first = int(wrong.nonzero()[0])
    values = _is_should_be(actual.flatten()[first], expected.flatten()[first])
    return f"{what} is wrong in {int(wrong.sum()):,} of {len(wrong):,} elements: element {first} {values}"


def _is_should_be(actual: torch.Tensor, expected: torch.Tensor) -> str:
    """With six digits, or with all of them where six are the same."""
    exact = shown(actual) == shown(expected)
    return f"is {shown(actual, exact)}, should be {shown(expected, exact)}"


def shown(value: Any, exact: bool = False) -> str:
    """A value as it may stand in a line: tensors as their numbers, long ones cut. exact: with all digits."""
    if isinstance(value, Words):
        return str(value)
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().flatten()
        numbers = ", ".join(str(number) if exact else f"{number:g}" for number in flat[:_SHOWN].tolist())
        return f"[{numbers}{', …' if len(flat) > _SHOWN else ''}]" if value.dim() else numbers
    if isinstance(value, dist.ProcessGroup):
        return "a process group"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "…"


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def ranks(numbers: Iterable[int]) -> str:
    """`Rank 2`, `Ranks 0 and 3`, `Ranks 0, 1 and 3`."""
    *others, last = sorted(numbers)
    return f"Ranks {', '.join(map(str, others))} and {last}" if others else f"Rank {last}"


def times(number: int) -> str:
    """`never`, `once`, `twice`, `3 times`."""
    return {0: "never", 1: "once", 2: "twice"}.get(number, f"{number:,} times")
