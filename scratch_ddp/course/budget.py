"""What an answer may send: where it has exceeded that, in words."""

from collections.abc import Mapping
from typing import Any

from scratch_ddp.course.wording import called, times
from scratch_ddp.instruments.traffic import Totals


def exceeded(
    totals: Totals,
    budget: Mapping[str, Any],
    *,
    only: tuple[str, ...] | None,
    exactly: bool,
    made_by: Mapping[str, str],
) -> list[str]:
    """What in `totals` is more than `budget` allows, as phrases. budget, only, exactly: as for `Trial.cost`.

    made_by: the object collectives that other calls were made by, such as all_gather_object.
    """
    used = {name for counts in totals.per_rank for name in counts.calls}
    complaints = [
        f"{_figure(name, getattr(totals, name))}, budget {limit:,}"
        for name, limit in budget.items()
        if name != "calls" and getattr(totals, name) > limit
    ]
    if only is not None and (others := sorted(used - set(only))):
        complaints = [f"calls {' and '.join(others)}, should be made of {' and '.join(only)} only"]
    allowed = budget.get("calls")
    for name in sorted(used) if allowed is not None else ():
        most = max(counts.calls.get(name, 0) for counts in totals.per_rank)
        if most > allowed.get(name, 0):
            maker = f" ({made_by[name]} is made of it)" if name in made_by else ""
            complaints.append(f"calls {name} {times(most)}, budget {allowed.get(name, 0)}{maker}")
    for name, number in (allowed or {}).items() if exactly else ():
        least = min(counts.calls.get(name, 0) for counts in totals.per_rank)
        if least < number:
            complaints.append(f"{name} {called(least, number)}")
    return complaints


def _figure(name: str, number: int) -> str:
    kind = {"depth": "depth {}", "messages": "{} messages", "max_messages": "{} messages from one rank"}
    return kind.get(name, "{} bytes from one rank").format(f"{number:,}")
