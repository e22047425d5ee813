"""What is said when a cell does not end well: which rank raised, died or waits, where, and who never came."""

from typing import Any

from scratch_ddp.cells.flight_recorder import describe_call, tell_difference
from scratch_ddp.cells.kernel.rank_process import RankInCell
from scratch_ddp.cells.words import RankError, name_ranks, ranks_by

_SINGULAR = {"waits": "waits", "has": "has", "is": "is"}
_PLURAL = {"waits": "wait", "has": "have", "is": "are"}


def describe_states(ranks: dict[int, RankInCell]) -> str:
    """ "rank 0 waits in all_reduce (line 3); ranks 1–3 never came (finished the cell)"."""
    if mismatch := describe_mismatch(ranks):
        return mismatch
    groups: dict[str, list[int]] = {}
    somebody_waits = any(state.waits_in for state in ranks.values())
    for rank, state in ranks.items():
        line = f"line {state.line}" if state.line else "native code or outside of the cell"
        if call := state.waits_in:
            called = call.get("called") or call["operation"]  # what the learner called, if that is known
            text = f"{{waits}} in {called}{call['peer']} ({line})"
        elif state.state == "running":
            text = f"{{has}} not come ({line})" if somebody_waits else f"{{is}} in {line}"
        elif somebody_waits:
            text = f"never came ({state.state})"
        elif state.state == "not in this cell":
            continue
        else:
            text = f"{{has}} {state.state}" if state.state == "finished the cell" else state.state
        groups.setdefault(text, []).append(rank)
    groups = dict(sorted(groups.items(), key=lambda entry: not entry[0].startswith("{waits}")))
    return "; ".join(
        f"{name_ranks(members)} {text.format(**_SINGULAR if len(members) == 1 else _PLURAL)}"
        for text, members in groups.items()
    )


def describe_mismatch(ranks: dict[int, RankInCell]) -> str:
    """What was called, if ranks wait in a collective in whose place others of its group have called something else."""
    for waiting, state in ranks.items():
        waits_in = state.waits_in
        if not waits_in or waits_in["peer"]:
            continue
        key = waits_in["group"], waits_in["number"]
        called: dict[int, str] = {}
        for rank, other in ranks.items():
            text = other.calls().get(key) if _includes(waits_in, rank) else ""
            elsewhere = other.waits_in
            each_other = elsewhere and _needs(elsewhere, waiting, state) and _needs(waits_in, rank, other)
            if text is None and each_other and elsewhere["group"] != key[0]:  # numbers of two groups can't be compared
                text = f"{describe_call(elsewhere)} in another group"
            if text:
                called[rank] = text
        if said := tell_difference(called, f" (line {state.line})" if state.line else ""):
            return said
    return ""


def _includes(call: dict[str, Any], rank: int) -> bool:
    """Whether the rank is in the call's group. A group that is not known is taken for that of all ranks."""
    return call["ranks"] is None or rank in call["ranks"]


def _needs(call: dict[str, Any], rank: int, state: RankInCell) -> bool:
    """Whether a call waits for the rank, which has not made it or has made another in its place."""
    if not _includes(call, rank):
        return False
    words = describe_call(call)
    another = not call["peer"] and state.calls().get((call["group"], call["number"]), words) != words
    return another or not _has_begun(call, state.process.place)


def _has_begun(call: dict[str, Any], place: dict[str, Any]) -> bool:
    """Whether a rank that has come so far has begun its part of this call."""
    return place["begun"].get(call["key"], 0) > call["position"]


def stuck_ranks(ranks: dict[int, RankInCell]) -> list[int]:
    """The ranks that can't go on: they have long waited for ranks that are through with the cell, or stuck as well."""
    running = [rank for rank, state in ranks.items() if state.state == "running"]
    free: set[int] = set()
    while more := [rank for rank in running if rank not in free and _may_go_on(rank, ranks, free)]:
        free.update(more)
    return [rank for rank in running if rank not in free]


def _may_go_on(rank: int, ranks: dict[int, RankInCell], free: set[int]) -> bool:
    call = ranks[rank].waits_in
    if not call or not ranks[rank].waits_for_long():
        return True
    others = {other: state for other, state in ranks.items() if other != rank and _includes(call, other)}
    enough = any if call["peer"] else all  # of the ranks that may send, one will do
    return enough(other in free or not _needs(call, other, state) for other, state in others.items())


def describe_open_calls(places: dict[int, dict[str, Any]]) -> list[str]:
    """A line for each collective that nobody waits for and that some of its ranks have not called."""
    callers: dict[tuple[int, int], list[int]] = {}
    calls = {}
    for rank, place in places.items():
        for call in place["open"]:
            if not call["awaited"] and not call["peer"]:
                key = call["uid"], call["position"]
                callers.setdefault(key, []).append(rank)
                calls[key] = call
    lines = []
    for key, by in callers.items():
        call = calls[key]
        missing = [rank for rank in call["ranks"] or places if not _has_begun(call, places[rank])]
        if missing:
            has, have = ("has" if len(who) == 1 else "have" for who in (by, missing))
            lines.append(
                f"({name_ranks(by)} {has} left {call['words']} open, which {name_ranks(missing)} {have} not called. "
                "The next collective will be taken for it: wait for it on all ranks.)"
            )
    return lines


def compose_rank_error(errors: dict[int, dict[str, Any]], notes: list[str]) -> RankError:
    """One exception for all ranks that raised: equal tracebacks once, with the ranks that they belong to."""
    errors = dict(sorted(errors.items()))
    lines = []
    for frames, ranks in ranks_by({rank: tuple(error["traceback"][:-1]) for rank, error in errors.items()}).items():
        lines += [f"── {name_ranks(ranks)} ──", *frames]
        last = ranks_by({rank: errors[rank]["traceback"][-1] for rank in ranks})
        lines += [text if len(last) == 1 else f"{name_ranks(members)}: {text}" for text, members in last.items()]
        lines.append("")
    texts = {rank: error["name"] + (f": {error['value']}" if error["value"] else "") for rank, error in errors.items()}
    messages = [f"{name_ranks(ranks)} raised {text}" for text, ranks in ranks_by(texts).items()]
    return RankError("\n".join([*messages, *notes]), lines)


def is_consequence(error: dict[str, Any]) -> bool:
    """Whether an error only says that a peer is gone."""
    return error["name"] in ("RuntimeError", "DistBackendError", "DistNetworkError") and any(
        sign in error["value"] for sign in ("closed by peer", "reset by peer", "Broken pipe", "gloo/transport")
    )
