"""`reveal`: a guess beside what was measured."""

import numbers
from collections.abc import Sequence
from typing import Any

import torch

_NEAR = 0.1  # of the guess: a guess that is off by less was good


def reveal(guess: Any, measured: Any, word: str = "measured") -> None:
    """Print the guess beside the measurement: two numbers, strings or booleans, or two lists of them, row by row.

    None stands for no guess. `word` says how the measurement was made; "computed" if nothing was measured. Prints
    nothing and raises TypeError if the guess is not of the same kind as the measurement, ValueError if it has another
    number of rows.
    """
    guess, measured = _plain(guess), _plain(measured)
    if guess is None or not isinstance(measured, list):
        print(_line(guess, measured, word))
        return
    _check_kind(guess, measured)
    if len(guess) != len(measured):
        raise ValueError(f"your guess has {len(guess)} rows, the measurement {len(measured)}")
    lines = [_line(one, other, word) for one, other in zip(guess, measured, strict=True)]
    print("\n".join(f"{row}: {line}" for row, line in enumerate(lines)))


def _line(guess: Any, measured: Any, word: str) -> str:
    if guess is None:
        return f"no guess made · {word} {_shown(measured)}"
    _check_kind(guess, measured)
    line = f"guess {_shown(guess)} · {word} {_shown(measured)}"
    if guess == measured:
        return f"{line}: as guessed"
    both = isinstance(measured, numbers.Real) and not isinstance(measured, bool) and guess and measured
    return f"{line}{_compared(measured / guess) if both else ''}"


def _compared(ratio: float) -> str:
    if abs(ratio - 1) >= _NEAR:
        return f": {ratio:.3g} times the guess"
    return f": near the guess, {100 * abs(ratio - 1):.2g}% {'more' if ratio > 1 else 'less'}"


def _check_kind(guess: Any, measured: Any) -> None:
    if _kind(guess) != _kind(measured):
        raise TypeError(f"your guess {guess!r} is {_kind(guess)}, what was measured is {_kind(measured)}: guess that")


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, numbers.Real):
        return "a number"
    return {str: "text", list: "a list"}.get(type(value), f"a {type(value).__name__}")


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor) or type(value).__module__ == "numpy":
        return value.tolist()
    return [_plain(each) for each in value] if isinstance(value, Sequence) and not isinstance(value, str) else value


def _shown(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return str(value)
    return f"{value:,}" if isinstance(value, numbers.Integral) else f"{value:,.6g}"
