"""What is said when a cell does not end well: which rank raised, died or waits, where, and who never came."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from scratch_ddp.cells.kernel.rank_lists import name_ranks
from scratch_ddp.cells.kernel.rank_process import RankProcess
from scratch_ddp.cells.last_call import read_last_call, spoken


class _SpokenError:
    """Shown as its own text: the kernel's frames would tell a learner nothing."""

    lines: list[str] = []

    def _render_traceback_(self) -> list[str]:
        return [*self.lines, f"{type(self).__name__}: {self}"]


class ClusterError(_SpokenError, RuntimeError):
    """A cell or a magic can't be carried out; the message says why and what would be right."""


class RankError(_SpokenError, RuntimeError):
    """At least one rank raised or died in a cell. `lines` holds each distinct traceback once."""

    def __init__(self, message: str, lines: Iterable[str] = ()):
        super().__init__(message)
        self.lines = list(lines)


class RankInterrupt(_SpokenError, KeyboardInterrupt):
    """The cell was stopped on every rank; the message says where the ranks were."""


@dataclass
class Whereabouts:
    """Where a rank is: `line` of the cell, and the operation that it waits in, if it does."""

    state: str  # "runs", "finished", "raised", "died", "absent" (not in this cell)
    line: int | None = None
    waits_in: dict[str, Any] | None = None
    calls: dict[tuple[str, int], str] = field(default_factory=dict)  # what it called last (see `read_calls`)

    @property
    def operation(self) -> str | None:
        """ "all_gather_object", "recv from rank 2": what the learner called, if that is known."""
        return (
            (self.waits_in.get("called") or self.waits_in["operation"]) + self.waits_in["peer"]
            if self.waits_in
            else None
        )


_REASONS = {
    "finished": "finished the cell",
    "raised": "raised",
    "died": "died",
    "absent": "not in this cell",
}


def describe_whereabouts(ranks: dict[int, Whereabouts]) -> str:
    """ "rank 0 waits in all_reduce (line 3); ranks 1–3 never came (finished the cell)"."""
    groups: dict[str, list[int]] = {}
    somebody_waits = any(where.operation for where in ranks.values() if where.state == "runs")
    for rank, where in ranks.items():
        line = f"line {where.line}" if where.line else "native code or outside of the cell"
        if where.state == "runs" and where.operation:
            text = f"{{verb:waits}} in {where.operation} ({line})"
        elif where.state == "runs":
            text = f"{{verb:has}} not come ({line})" if somebody_waits else f"{{verb:is}} in {line}"
        elif somebody_waits:
            text = f"never came ({_REASONS[where.state]})"
        elif where.state == "absent":
            continue
        else:
            text = f"{{verb:has}} {_REASONS[where.state]}" if where.state == "finished" else _REASONS[where.state]
        groups.setdefault(text, []).append(rank)
    mismatch = describe_mismatch(ranks)
    if mismatch:
        return mismatch
    groups = dict(sorted(groups.items(), key=lambda entry: not entry[0].startswith("{verb:waits}")))
    return "; ".join(f"{name_ranks(members)} {_conjugate(text, len(members))}" for text, members in groups.items())


def describe_mismatch(ranks: dict[int, Whereabouts]) -> str:
    """What was called, if ranks wait in a collective in whose place others of its group have called something else."""
    for waiting, where in ranks.items():
        waits_in = where.waits_in if where.state == "runs" else None
        if not waits_in or waits_in["peer"]:
            continue
        key = waits_in["group"], waits_in["number"]
        called: dict[str, list[int]] = {}
        for rank, other in ranks.items():
            text = other.calls.get(key) if _is_for(rank, waits_in) else ""
            elsewhere = other.waits_in if other.state == "runs" else None
            if text is None and elsewhere and elsewhere["group"] != key[0] and _awaits(elsewhere, waiting, where):
                text = f"{spoken(elsewhere)} in another group"  # there are no numbers to compare, but neither will come
            if text:
                called.setdefault(text, []).append(rank)
        if len(called) > 1:
            told = "; ".join(f"{name_ranks(who)} called {text}" for text, who in called.items())
            line = f" (line {where.line})" if where.line else ""
            return f"{told}{line}. All ranks must call the same, with tensors of one shape and dtype"
    return ""


def _is_for(rank: int, operation: dict[str, Any]) -> bool:
    """Whether the rank is in the operation's group. A group that is not known is taken for that of all ranks."""
    return operation["ranks"] is None or rank in operation["ranks"]


def _awaits(operation: dict[str, Any], rank: int, where: Whereabouts) -> bool:
    """Whether the operation needs the rank, which has not called it."""
    return _is_for(rank, operation) and (operation["group"], operation["number"]) not in where.calls


def _conjugate(text: str, count: int) -> str:
    for one, many in (("waits", "wait"), ("has", "have"), ("is", "are")):
        text = text.replace(f"{{verb:{one}}}", one if count == 1 else many)
    return text


def describe_death(rank: RankProcess) -> str:
    """How a rank ended, where in the cell, what it had called last and what it said last."""
    text = f"rank {rank.rank} {rank.how_it_ended()}"
    if line := rank.line_of_crash():
        text += f" in line {line} of the cell"
    called = read_last_call(rank.folder, rank.rank)
    if called:
        text += f"; its last call: {called}"
    return text


def explain_sizes(ranks: list[RankProcess], dead: Iterable[int]) -> str:
    """gloo ends the process when ranks send tensors of different size: say so where the ranks' last calls show it."""
    if not any("ABRT" in ranks[rank].how_it_ended() for rank in dead):
        return ""
    calls = {rank.rank: read_last_call(rank.folder, rank.rank) for rank in ranks}
    if len(set(calls.values())) < 2:
        return ""
    told = ", ".join(f"rank {rank} {call or 'nothing'}" for rank, call in calls.items())
    return (
        f"\nThe ranks did not call the same thing: {told}. gloo ends the whole process when sizes or types differ; "
        "in one collective all ranks must pass tensors of one shape and dtype."
    )


def compose_rank_error(errors: dict[int, dict[str, Any]], notes: list[str]) -> RankError:
    """One exception for all ranks that raised: equal tracebacks once, with the ranks that they belong to."""
    by_frames: dict[tuple[str, ...], list[int]] = {}
    for rank, error in sorted(errors.items()):
        by_frames.setdefault(tuple(error["traceback"][:-1]), []).append(rank)
    lines = []
    for frames, ranks in by_frames.items():
        lines += [f"── {name_ranks(ranks)} ──", *frames]
        last: dict[str, list[int]] = {}
        for rank in ranks:
            last.setdefault(errors[rank]["traceback"][-1], []).append(rank)
        for text, sayers in last.items():
            lines.append(text if len(last) == 1 else f"{name_ranks(sayers)}: {text}")
        lines.append("")
    by_message: dict[str, list[int]] = {}
    for rank, error in sorted(errors.items()):
        value = error["value"]
        by_message.setdefault(error["name"] + (f": {value}" if value else ""), []).append(rank)
    messages = [f"{name_ranks(ranks)} raised {message}" for message, ranks in by_message.items()]
    return RankError("\n".join([*messages, *notes]), lines)


def is_consequence(error: dict[str, Any]) -> bool:
    """Whether an error only says that a peer is gone."""
    return error["name"] in ("RuntimeError", "DistBackendError", "DistNetworkError") and any(
        sign in error["value"] for sign in ("closed by peer", "reset by peer", "Broken pipe", "gloo/transport")
    )
