"""Checks that end alike on every rank: what one rank finds wrong, all ranks raise.

A rank that raises alone leaves the others waiting in their next collective. So each rank tells the others what it has
found, and then all of them raise. These messages have the same size on every rank, since gloo ends the process where
sizes differ.
"""

import contextlib
import hashlib
import itertools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from scratch_ddp.common.accounting import set_up

_LARGEST = dist.AllreduceOptions()
_LARGEST.reduceOp = dist.ReduceOp.MAX

LEFT_ALONE = (
    "Another rank has ended, or did not come within the time limit. If its batches ran out first, give every rank "
    "equally many: DistributedSampler(…, drop_last=True), or leave out the remainder."
)


class Compared(NamedTuple):
    """The numbers of all ranks compared. The same on every rank."""

    largest: dict[str, int]
    different: frozenset[Hashable]  # the names in `same` whose numbers are not equal on all ranks
    flags: list[int]  # the largest of each


def compare(
    group: dist.ProcessGroup | None,
    same: Mapping[Hashable, int],
    numbers: Mapping[str, int],
    flags: Sequence[int] = (),
) -> Compared:
    """Compare numbers over the ranks: which of `same` differ anywhere, and the largest of each other number.

    All ranks pass the same names and equally many `flags`, which are numbers without names. A number has at most 62
    bits (see `digest`). Costs one all-reduce, counted as set-up, of 8 bytes per number and 16 for each of `same`, in
    main memory where the group has a backend for it; through NCCL the processor waits for the GPU's work.
    """
    # The largest of the negative numbers is that of the smallest number.
    row = [*same.values(), *(-value for value in same.values()), *numbers.values(), *flags]
    message = torch.tensor(row, dtype=torch.int64, device=message_device(group))
    with set_up():
        try:  # straight to the group: dist.all_reduce's checks take as long as the message does
            (group or dist.group.WORLD).allreduce([message], _LARGEST).wait()
        except RuntimeError as error:
            error.add_note(LEFT_ALONE)
            raise
        found = message.tolist()
    largest, smallest, rest = found[: len(same)], found[len(same) : 2 * len(same)], found[2 * len(same) :]
    different = [name for name, high, low in zip(same, largest, smallest, strict=True) if high != -low]
    return Compared(dict(zip(numbers, rest, strict=False)), frozenset(different), rest[len(numbers) :])


def digest(lines: Sequence[str]) -> int:
    """A number of 56 bits that stands for the lines: equal lines have equal numbers."""
    return int.from_bytes(hashlib.sha256("\n".join(lines).encode()).digest()[:7], "big")


def raise_everywhere(
    problem: str | None, group: dist.ProcessGroup | None = None, error: type[Exception] = ValueError
) -> None:
    """Raise `error` on every rank if any rank has a `problem`; the message lists the ranks, each with its problem.

    Every rank of the group calls it, those without a problem with None. Costs what `check_everywhere` does.
    """
    __tracebackhide__ = True  # IPython then shows the caller's line
    check_everywhere((), "", group, problem, error)


@contextlib.contextmanager
def together(
    group: dist.ProcessGroup | None, error: type[Exception] = ValueError, what: str = "", complaint: str = ""
) -> Iterator[list[str]]:
    """Raise `error` on every rank if the block raises on any: with a message that begins with `what`.

    Or else raise ValueError with the complaint unless all ranks have put the same lines into the list that the block
    gets. Every rank calls it. Costs what `check_everywhere` does.
    """
    __tracebackhide__ = True
    problem, lines = None, []
    try:
        yield lines
    except BaseException as raised:
        failures = list(getattr(raised, "failures", {}).values())  # a CheckpointException, which is no Exception
        cause = failures[0][0] if failures else raised
        if not isinstance(cause, Exception):
            raise
        kind = "" if isinstance(cause, (ValueError, error)) else type(cause).__name__
        problem = ": ".join(filter(None, [what, kind, str(cause).partition("\n")[0]]))
    check_everywhere(lines, complaint, group, problem, error)


def check_everywhere(
    lines: Sequence[str],
    complaint: str,
    group: dist.ProcessGroup | None = None,
    problem: str | None = None,
    error: type[Exception] = ValueError,
) -> None:
    """Raise `error` on every rank if any has a `problem`, or else ValueError unless all ranks have the same lines.

    The message is that of `raise_everywhere`; or the complaint, then for each rank that differs from the first rank
    the first line that does. Without a process group it concerns this process alone. Costs one all-reduce of 24 bytes;
    the lines themselves travel only where they differ.
    """
    __tracebackhide__ = True
    if not dist.is_initialized():
        if problem is not None:
            raise error(problem)
        return
    found = compare(group, {"lines": digest(lines)}, {"problem": problem is not None})
    if found.largest["problem"]:
        raise error("\n".join(said_by_ranks(problem or "", group)))
    if not found.different:
        return
    texts = [each.splitlines() for each in gather_texts("\n".join(lines), group)]
    ranks = dist.get_process_group_ranks(group)
    for rank, its in zip(ranks, texts, strict=True):
        for entry, (here, there) in enumerate(itertools.zip_longest(its, texts[0], fillvalue="nothing more")):
            if here != there:
                complaint += f"\nrank {rank}: entry {entry} is {here}, but {there} on rank {ranks[0]}"
                break
    raise ValueError(complaint)


def said_by_ranks(text: str, group: dist.ProcessGroup | None = None) -> list[str]:
    """["rank 2: this", "ranks 0, 1: that"]: each distinct text once, with its ranks, as the whole world counts them.

    Those who say nothing are left out. Every rank calls it.
    """
    ranks: dict[str, list[int]] = {}
    for rank, its in zip(dist.get_process_group_ranks(group), gather_texts(text, group), strict=True):
        ranks.setdefault(its, []).append(rank)
    some = ((its, ", ".join(map(str, them)), len(them) > 1) for its, them in ranks.items() if its)
    return [f"rank{'s' if several else ''} {them}: {its}" for its, them, several in some]


def gather_texts(text: str, group: dist.ProcessGroup | None = None) -> list[str]:
    """Return every rank's text, in rank order. Two all-gathers, counted as set-up."""
    texts = [""] * dist.get_world_size(group)
    with set_up():
        dist.all_gather_object(texts, text, group=group)
    return texts


def message_device(group: dist.ProcessGroup | None = None) -> torch.device:
    """Where the small messages of a check live: in main memory, or on the current GPU where the group needs that."""
    if "cpu:" in dist.get_backend_config(group):
        return torch.device("cpu")
    return torch.device(torch.accelerator.current_accelerator().type, torch.accelerator.current_device_index())
