"""What all ranks together say of an answer, line by line."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

# FOLDED: How ranks, numbers and values are put into words.

_SHOWN = 8  # elements of a tensor


def ranks(numbers: Iterable[int]) -> str:
    """`Rank 2`, `Ranks 0 and 3`, `Ranks 0, 1 and 3`."""
    *others, last = sorted(numbers)
    return f"Ranks {', '.join(map(str, others))} and {last}" if others else f"Rank {last}"


def times(number: int) -> str:
    return {0: "never", 1: "once", 2: "twice"}.get(number, f"{number:,} times")


def shown(value: Any) -> str:
    """A value as it may stand in a line: tensors as their numbers, long ones cut."""
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().flatten()
        numbers = ", ".join(f"{number:g}" for number in flat[:_SHOWN].tolist())
        return f"[{numbers}{', …' if len(flat) > _SHOWN else ''}]"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "…"


def difference(actual: Any, expected: Any, tolerance: float = 0.0) -> str:
    """In what `actual` differs from `expected`, or "" if it does not.

    Tensors are compared by shape, dtype and every element (within `tolerance`, relative to the largest expected
    one), lists entry by entry, other values with ==.
    """
    if type(actual) is not type(expected):
        return f"is {_kind(actual)}, should be {_kind(expected)}"
    if isinstance(expected, list) and any(isinstance(entry, torch.Tensor) for entry in expected):
        return _difference_of_lists(actual, expected, tolerance)
    if not isinstance(expected, torch.Tensor):
        return "" if actual == expected else f"is {shown(actual)}, should be {shown(expected)}"
    for what in ("shape", "dtype"):
        if getattr(actual, what) != getattr(expected, what):
            return f"has {what} {_plain(getattr(actual, what))}, should have {_plain(getattr(expected, what))}"
    if not expected.numel():
        return ""
    near = (actual - expected).abs() <= tolerance * expected.abs().max() if tolerance else actual == expected
    wrong = ~near.flatten()  # NaN is never near
    if not wrong.any():
        return ""
    first = int(wrong.nonzero()[0])
    if len(wrong) > _SHOWN:
        values = f"{actual.flatten()[first]:g}, should be {expected.flatten()[first]:g}"
        return f"is wrong in {int(wrong.sum())} of {len(wrong)} elements: element {first} is {values}"
    return f"is {shown(actual)}, should be {shown(expected)}"


def _difference_of_lists(actual: list, expected: list, tolerance: float) -> str:
    if len(actual) != len(expected):
        return f"has {len(actual)} entries, should have {len(expected)}"
    for i, (one, other) in enumerate(zip(actual, expected, strict=True)):
        if text := difference(one, other, tolerance):
            return f"at entry {i} {text}"
    return ""


def _kind(value: Any) -> str:
    if value is None:
        return "None"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _plain(value: Any) -> str:
    return str(tuple(value)) if isinstance(value, torch.Size) else str(value).removeprefix("torch.")


NOT_WRITTEN = "not written yet"


@dataclass(frozen=True)
class Verdict:
    """criteria: name -> complaint, "" where the criterion holds; printed: what the answer printed; notes: what else
    a learner has to know."""

    criteria: dict[str, str] = field(default_factory=dict)
    printed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def with_note(self, note: str) -> "Verdict":
        return replace(self, notes=(*self.notes, note)) if note else self

    @property
    def written(self) -> bool:
        return bool(self.criteria)

    @property
    def passed(self) -> bool:
        return self.written and not any(self.criteria.values())

    @property
    def lines(self) -> list[str]:
        """`✓ value   ✓ agreement`, then a line for each criterion that does not hold."""
        if not self.written:
            return [NOT_WRITTEN]
        held = "   ".join(f"✓ {name}" for name, complaint in self.criteria.items() if not complaint)
        failed = [f"✗ {name:<7} {complaint}" for name, complaint in self.criteria.items() if complaint]
        return [*self.printed, *([held] if held else []), *failed, *(f"· {note}" for note in self.notes)]


def fault(outcomes: list[dict[str, Any]], seconds: float) -> str:
    """Which ranks did not come back from the call, in one or two sentences; "" if all returned."""
    groups: dict[str, list[int]] = {}
    for how in ("raised", "unfinished"):
        for rank, outcome in enumerate(outcomes):
            if outcome["how"] == how:
                groups.setdefault(_ending(outcome, seconds), []).append(rank)
    return " ".join(f"{ranks(members)} {text}." for text, members in groups.items())


def _ending(outcome: dict[str, Any], seconds: float) -> str:
    line = f"in line {outcome['line']}" if outcome["line"] else ""
    code = f", `{outcome['code']}`" if outcome["code"] else ""
    if outcome["how"] == "raised":
        return f"raised {outcome['error']}{f' ({line}{code})' if line else ''}"
    return f"did not come back: after {seconds:g} s still {line or 'running'}{code}"


def merge(
    found: list[dict[str, tuple[int, str]]], digests: list[list[tuple[str, str]]], shared: dict[str, str]
) -> dict[str, str]:
    """The criteria of all ranks as one: the complaint that comes first, with its rank, and who else complains.

    found, digests: by rank, as Trial keeps them; shared: what is the same on all ranks.
    """
    merged = {}
    for name in dict.fromkeys(name for criteria in found for name in criteria):  # in the order they were stated
        complaints = [(*criteria.get(name, (0, "")), rank) for rank, criteria in enumerate(found)]
        complaints = sorted((call, rank, text) for call, text, rank in complaints if text)
        others = [rank for _, rank, _ in complaints[1:]]
        too = f" {ranks(others)} too." if others else ""
        merged[name] = f"{ranks([complaints[0][1]])}{complaints[0][2]}.{too}" if complaints else ""
    if digests[0]:
        merged["agreement"] = _disagreement(digests)
    return merged | shared


def _disagreement(digests: list[list[tuple[str, str]]]) -> str:
    for entries in zip(*digests, strict=True):  # one value at a time, as all ranks hold it
        others = [rank for rank, entry in enumerate(entries) if entry[1] != entries[0][1]]
        if others:
            case = f"{entries[0][0]}: " if entries[0][0] else ""
            return f"{case}{ranks(others)} {'holds' if len(others) == 1 else 'hold'} other bits than rank 0."
    return ""


def prints(calls: list[list[dict[str, Any]]]) -> tuple[str, ...]:
    """What the answer printed in its first calls, each text once, with the ranks that printed it; a flood cut short."""
    texts: dict[tuple, list[int]] = {}
    for rank in range(len(calls[0]) if calls else 0):
        first = next((call[rank] for call in calls if call[rank]["lines_printed"]), None)
        if first:
            total = sum(call[rank]["lines_printed"] for call in calls)
            texts.setdefault((tuple(first["printed"]), total), []).append(rank)
    return tuple(line for (shown, total), members in texts.items() for line in _print_of(members, shown, total))


def _print_of(members: list[int], shown: tuple[str, ...], total: int) -> list[str]:
    cut = f" {total:,} lines in all; the first {len(shown)}" if total > len(shown) else ""
    return [f"· {ranks(members)} printed{cut}:", *(f"·   {line}" for line in shown)]
