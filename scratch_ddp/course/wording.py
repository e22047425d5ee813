"""How ranks, numbers and values are put into words, for the lines that `check` prints."""

import ctypes
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from scratch_ddp.course.freed_memory import is_freed

_SHOWN = 8  # elements of a tensor


def ranks(numbers: Iterable[int]) -> str:
    """`Rank 2`, `Ranks 0 and 3`, `Ranks 0, 1 and 3`."""
    *others, last = sorted(numbers)
    return f"Ranks {', '.join(map(str, others))} and {last}" if others else f"Rank {last}"


def times(number: int) -> str:
    """`never`, `once`, `twice`, `3 times`."""
    return {0: "never", 1: "once", 2: "twice"}.get(number, f"{number:,} times")


def called(number: int, expected: int) -> str:
    """`is never called, should be twice`; "" if it is called as often as expected."""
    how = f"called {times(number)}" if number else "never called"
    return f"is {how}, should {f'be {times(expected)}' if expected else 'never be'}" if number != expected else ""


def shown(value: Any, exact: bool = False) -> str:
    """A value as it may stand in a line: tensors as their numbers, long ones cut. exact: with all digits.

    A tensor without dimensions is shown as a number.
    """
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().flatten()
        numbers = ", ".join(str(number) if exact else f"{number:g}" for number in flat[:_SHOWN].tolist())
        return f"[{numbers}{', …' if len(flat) > _SHOWN else ''}]" if value.dim() else numbers
    if isinstance(value, dist.ProcessGroup):
        return f"the group of {ranks(dist.get_process_group_ranks(value)).lower()}"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "…"


def difference(actual: Any, expected: Any, tolerance: float = 0.0) -> str:
    """How `actual` differs from `expected`, as a phrase such as `is 3, should be 4`; "" if it does not.

    Tensors are compared by shape, dtype and every element (within `tolerance`, relative to the largest expected
    one; NaN only equals NaN), lists entry by entry, other values with ==. An int will do for a float.
    """
    if type(actual) is int and isinstance(expected, float):
        actual = float(actual)
    if type(actual) is not type(expected):
        beside_numpy = type(actual).__module__ == "numpy" and type(expected).__module__ == "builtins"
        return f"is {_kind(actual)}, should be {_kind(expected, 'Python ' if beside_numpy else '')}"
    if isinstance(expected, list) and any(isinstance(entry, torch.Tensor) for entry in expected):
        return _difference_of_lists(actual, expected, tolerance)
    if isinstance(expected, torch.Tensor):
        return _difference_of_tensors(actual, expected, tolerance)
    try:
        equal = bool(actual == expected)
    except ValueError:  # numpy's arrays in a list: each comparison has many results
        equal = False
    if not equal:
        return f"is {shown(actual)}, should be {shown(expected)}"
    return _difference_in_kind(actual, expected) if isinstance(expected, list) else ""


def bits(value: Any) -> bytes:
    """What two values are compared by to the last bit: NaN equals NaN, and -0.0 is not 0.0."""
    if isinstance(value, torch.Tensor):
        if value.layout is torch.strided and is_freed(value):
            return b"freed"
        if _lies_plainly(value):
            return ctypes.string_at(value.data_ptr(), value.nbytes)  # one step instead of five, for many small tensors
        return value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    if isinstance(value, list):
        return b"".join(bits(entry) + b"|" for entry in value)
    return repr(value).encode()


def difference_in_bits(actual: Any, expected: Any) -> str:
    """As `difference`, to the last bit."""
    return "" if bits(actual) == bits(expected) else "differs in some bits, as 0.0 and -0.0 do, or two kinds of NaN"


def _lies_plainly(tensor: torch.Tensor) -> bool:
    """Its bytes are in main memory, all of them, in order, and mean what they say."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not (tensor.is_conj() or tensor.is_neg())
    )


def _difference_in_kind(actual: list, expected: list) -> str:
    """Of lists that are equal: an entry that is a tensor, for instance, where a number is expected."""
    for i, (one, other) in enumerate(zip(actual, expected, strict=True)):
        if not isinstance(one, (type(other), int) if isinstance(other, float) else type(other)):
            return f"at entry {i} is {_kind(one)}, should be {_kind(other)}"
    return ""


def _difference_of_lists(actual: list, expected: list, tolerance: float) -> str:
    if len(actual) != len(expected):
        return f"has {len(actual)} entries, should have {len(expected)}"
    for i, (one, other) in enumerate(zip(actual, expected, strict=True)):
        if text := difference(one, other, tolerance):
            return f"at entry {i} {text}"
    return ""


def _difference_of_tensors(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> str:
    if actual.shape != expected.shape:
        return f"has shape {tuple(actual.shape)}, should have {tuple(expected.shape)}"
    if actual.dtype != expected.dtype:
        return f"has dtype {_dtype(actual)}, should have {_dtype(expected)}"
    if not expected.numel():
        return ""
    actual, expected = actual.data, expected.data  # autograd may refuse to look at an answer's views
    if torch.equal(actual, expected):
        return ""
    near = actual == expected
    if tolerance:
        finite = expected[expected.isfinite()]
        largest = finite.abs().max() if finite.numel() else torch.tensor(0)
        if largest.isinf():  # so it can be for a complex number of finite parts
            largest = torch.finfo(largest.dtype).max
        near |= (actual - expected).abs() <= tolerance * largest
    if expected.is_floating_point():
        near |= actual.isnan() & expected.isnan()
    wrong = ~near.flatten()
    if not wrong.any():
        return ""
    if len(wrong) <= _SHOWN:
        return _is_should_be(actual, expected)
    first = int(wrong.nonzero()[0])
    values = _is_should_be(actual.flatten()[first], expected.flatten()[first])
    return f"is wrong in {int(wrong.sum())} of {len(wrong)} elements: element {first} {values}"


def _is_should_be(actual: torch.Tensor, expected: torch.Tensor) -> str:
    """With six digits, or with all of them where six are the same."""
    exact = shown(actual) == shown(expected)
    return f"is {shown(actual, exact)}, should be {shown(expected, exact)}"


def _kind(value: Any, language: str = "") -> str:
    if value is None:
        return "None"
    if isinstance(value, dist.ProcessGroup):
        return "a process group"
    kind = type(value)
    name = f"{language}{'numpy.' if kind.__module__ == 'numpy' else ''}{kind.__name__}"
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
