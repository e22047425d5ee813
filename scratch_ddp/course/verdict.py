"""What all ranks together say of an answer, line by line."""

from dataclasses import dataclass, field, replace
from typing import Any

from scratch_ddp.course.wording import ranks

NOT_WRITTEN = "not written yet"


@dataclass(frozen=True)
class Verdict:
    """The result of an examination, the same on every rank.

    criteria: name -> complaint, "" where the criterion holds; no criteria: the answer is not written yet. printed:
    what the answer printed. notes: what else a learner has to know.
    """

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
    """Which ranks did not return from the call, and which did if others hang; "" if all did. outcomes: by rank."""
    groups: dict[str, list[int]] = {}
    for how in ("raised", "unfinished"):
        for rank, outcome in enumerate(outcomes):
            if outcome["how"] == how:
                groups.setdefault(_ending(outcome, seconds), []).append(rank)
    returned = [rank for rank, outcome in enumerate(outcomes) if outcome["how"] == "returned"]
    if returned and any(outcome["how"] == "unfinished" for outcome in outcomes):
        groups["had returned"] = returned
    return " ".join(f"{ranks(members)} {text}." for text, members in groups.items())


def _ending(outcome: dict[str, Any], seconds: float) -> str:
    line = f"in line {outcome['line']}" if outcome["line"] else ""
    code = f", `{outcome['code']}`" if outcome["code"] else ""
    if outcome["how"] == "raised":
        return f"raised {outcome['error']}{f' ({line}{code})' if line else ''}"
    return f"did not come back: after {seconds:g} s still {line or 'running'}{code}"


def merge(
    found: list[dict[str, tuple[int, str]]], digests: list[list[tuple[str, str]]], shared: list[dict[str, str]]
) -> dict[str, str]:
    """The criteria of all ranks as one: of each the earliest complaint, its rank, and who else complains of that call.

    found, digests, shared: by rank, as Trial keeps them. A rank on which a test ended early has fewer.
    """
    merged = {}
    for name in dict.fromkeys(name for criteria in found for name in criteria):  # in the order they were stated
        complaints = [(*criteria.get(name, (0, "")), rank) for rank, criteria in enumerate(found)]
        complaints = sorted((call, rank, text) for call, text, rank in complaints if text)
        others = [rank for call, rank, _ in complaints[1:] if call == complaints[0][0]]
        too = f" {ranks(others)} too." if others else ""
        merged[name] = f"{ranks([complaints[0][1]])}{complaints[0][2]}.{too}" if complaints else ""
        if complaints and (elsewhere := complaints[0][2].lstrip(":, ")).startswith("if there w"):
            merged[name] = f"{elsewhere}."  # of a world that this rank alone has tried: its own number says nothing
    if all(digests):
        merged["agreement"] = _disagreement(digests)
    together: dict[str, str] = {}
    for each in shared:
        together |= {name: text for name, text in each.items() if not together.get(name)}
    merged |= {name: text for name, text in together.items() if text or not merged.get(name)}
    if len({len(each) for each in digests}) > 1 and not any(merged.values()):
        merged["runs"] = "The ranks were not examined alike: a fault of the check."
    return merged


def _disagreement(digests: list[list[tuple[str, str]]]) -> str:
    for entries in zip(*digests, strict=False):  # of one value, on all ranks
        others = [rank for rank, entry in enumerate(entries) if entry[1] != entries[0][1]]
        if others:
            case = f"{entries[0][0]}: " if entries[0][0] else ""
            return f"{case}{ranks(others)} {'has' if len(others) == 1 else 'have'} different bits from rank 0."
    return ""


def prints(calls: list[list[dict[str, Any]]]) -> tuple[str, ...]:
    """What the answer printed: the first lines of each rank, each text once, and how many lines there are in all.

    calls: the outcomes of each call, by rank.
    """
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
