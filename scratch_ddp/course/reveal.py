"""`reveal`: a guess beside what was measured."""

import numbers
from typing import Any

_NEAR = 0.1  # of the guess: a guess that is off by less was good


def reveal(guess: Any, measured: Any, word: str = "measured") -> None:
    """Print the guess beside the measurement: two numbers, strings or booleans, or two lists of them, row by row.

    None stands for no guess. `word` says how the measurement was made; "computed" if nothing was measured. Prints
    nothing and raises TypeError if the guess is not of the same kind as the measurement, ValueError if it has another
    number of rows.
    """
    guess, measured = _plain(guess), _plain(measured)
    if isinstance(guess, list) and isinstance(measured, list):
        if len(guess) != len(measured):
            raise ValueError(f"your guess has {len(guess)} rows, the measurement {len(measured)}")
        lines = [f"{row}: {_line(*pair, word)}" for row, pair in enumerate(zip(guess, measured, strict=True))]
        print("\n".join(lines))
    else:
        print(_line(guess, measured, word))


def _line(guess: Any, measured: Any, word: str) -> str:
    if guess is None:
        return f"no guess made · {word} {_shown(measured)}"
    kinds = [_kind(guess), _kind(measured)]
    if kinds[0] != kinds[1]:
        raise TypeError(f"your guess {guess!r} is {kinds[0]}, what was measured is {kinds[1]}: guess that")
    line = f"guess {_shown(guess)} · {word} {_shown(measured)}"
    if guess == measured:
        return f"{line}: as guessed"
    if kinds[0] != "a number" or not guess or not measured:
        return line
    ratio = measured / guess
    near = f"near the guess, {100 * abs(ratio - 1):.2g}% {'more' if ratio > 1 else 'less'}"
    return f"{line}: {near if abs(ratio - 1) < _NEAR else f'{ratio:.3g} times the guess'}"


def _kind(value: Any) -> str:
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        return "a number"
    return {bool: "a boolean", str: "text", list: "a list"}.get(type(value), f"a {type(value).__name__}")


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):  # a tensor, or numpy's
        return value.tolist()
    return [_plain(each) for each in value] if isinstance(value, (list, tuple)) else value


def _shown(value: Any) -> str:
    if _kind(value) != "a number":
        return str(value)
    return f"{value:,}" if isinstance(value, numbers.Integral) else f"{value:,.6g}"
