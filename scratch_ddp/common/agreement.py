"""Checks whose answer is the same on every rank: what one rank finds wrong, all ranks raise.

A rank that raises alone leaves the others waiting in their next collective. So each rank says what it found, in
messages whose size is the same everywhere (gloo ends the process when sizes differ), and all of them raise together.
"""

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from scratch_ddp.common.accounting import set_up

_LARGEST = dist.AllreduceOptions()
_LARGEST.reduceOp = dist.ReduceOp.MAX


def message_device(group: dist.ProcessGroup | None = None) -> torch.device:
    """Where the small messages of a check live: in main memory, or on the current GPU where the group wants that."""
    if "cpu:" in dist.get_backend_config(group):
        return torch.device("cpu")
    return torch.device(torch.accelerator.current_accelerator().type, torch.accelerator.current_device_index())


def gather_rows(row: torch.Tensor, group: dist.ProcessGroup | None = None) -> list[torch.Tensor]:
    """Return every rank's `row`, in rank order and in main memory. Same shape and dtype everywhere. One all-gather."""
    row = row.to(message_device(group))
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, row, group=group)
    return [each.cpu() for each in rows]


def gather_texts(text: str, group: dist.ProcessGroup | None = None) -> list[str]:
    """Return every rank's text, in rank order. Two all-gathers: the lengths, then the texts padded to the longest."""
    data = torch.tensor(list(text.encode()), dtype=torch.uint8)
    lengths = [int(length) for length in gather_rows(torch.tensor([len(data)]), group)]
    padded = torch.nn.functional.pad(data, (0, max(lengths) - len(data)))
    rows = gather_rows(padded, group) if max(lengths) else [data] * len(lengths)
    return [bytes(row[:length].tolist()).decode() for row, length in zip(rows, lengths, strict=True)]


class Compared(NamedTuple):
    """What all ranks said, the same on every rank: of each number the largest, and what was not the same everywhere."""

    largest: dict[str, int]
    different: frozenset[str]  # names out of `same`
    flags: list[int]


def compare(
    group: dist.ProcessGroup | None,
    same: Mapping[str, int],
    numbers: Mapping[str, int],
    flags: Sequence[int] = (),
) -> Compared:
    """Put the ranks' numbers together: which of `same` differ between ranks, and the largest of each other number.

    All ranks pass the same names and as many `flags`, numbers of which the largest is taken too. Numbers have at most
    62 bits (see `digest`). Raises nothing itself. Costs one all-reduce of 8 bytes a number and 16 for each of `same`,
    in main memory where the group has a backend for it; through NCCL the processor waits for the GPU's work.
    """
    row = [*same.values(), *(-value for value in same.values()), *numbers.values(), *flags]
    message = torch.tensor(row, dtype=torch.int64, device=message_device(group))
    with set_up():
        # Straight to the group: dist.all_reduce checks once more what is known, which takes as long as the message.
        (group or dist.group.WORLD).allreduce([message], _LARGEST).wait()
        found = message.tolist()
    largest, negated, rest = found[: len(same)], found[len(same) : 2 * len(same)], found[2 * len(same) :]
    different = [name for name, high, low in zip(same, largest, negated, strict=True) if high != -low]
    return Compared(dict(zip(numbers, rest, strict=False)), frozenset(different), rest[len(numbers) :])


def digest(lines: Sequence[str]) -> int:
    """A number of 56 bits that stands for the lines: equal lines have equal numbers."""
    return int.from_bytes(hashlib.sha256("\n".join(lines).encode()).digest()[:7], "big")


def raise_everywhere(
    problem: str | None, group: dist.ProcessGroup | None = None, error: type[Exception] = ValueError
) -> None:
    """Raise `error` on every rank if any rank has a `problem`; the message lists the ranks, each with its problem.

    Every rank of the group calls it, those without a problem with None. Without a process group it concerns this
    process alone. Costs one all-reduce of 1 byte while all is well.
    """
    __tracebackhide__ = True  # IPython then shows the caller's line
    if not dist.is_initialized():
        if problem is not None:
            raise error(problem)
        return
    with set_up():
        found = torch.tensor([problem is not None], dtype=torch.uint8, device=message_device(group))
        dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
        problems = gather_texts(problem or "", group) if found.item() else []
    if any(problems):
        found = {rank: text for rank, text in zip(rank_numbers(group), problems, strict=True) if text}
        raise error("\n".join(who_said_what(found)))


def check_same_lines(lines: Sequence[str], complaint: str, group: dist.ProcessGroup | None = None) -> None:
    """Raise ValueError on every rank unless all ranks have the same lines: `complaint`, then who differs first in what.

    Costs one all-gather of 32 bytes a rank; the lines themselves travel only where they differ.
    """
    text = "\n".join(lines)
    with set_up():
        digest = torch.frombuffer(bytearray(hashlib.sha256(text.encode()).digest()), dtype=torch.uint8)
        if all(torch.equal(digest, other) for other in gather_rows(digest, group)):
            return
        texts = [each.splitlines() for each in gather_texts(text, group)]
    ranks = rank_numbers(group)
    differences = [
        f"rank {rank}: {_first_difference(its, texts[0])} on rank {ranks[0]}"
        for rank, its in zip(ranks, texts, strict=True)
        if its != texts[0]
    ]
    raise ValueError("\n".join([complaint, *differences]))


def _first_difference(mine: list[str], rank0s: list[str]) -> str:
    for position, (here, there) in enumerate(itertools.zip_longest(mine, rank0s, fillvalue="nothing more")):
        if here != there:
            return f"entry {position} is {here}, but {there}"
    return "no difference"


def rank_numbers(group: dist.ProcessGroup | None = None) -> list[int]:
    """The group's ranks by their numbers in the whole world, which is how messages name them."""
    return dist.get_process_group_ranks(group)


def who_said_what(said: Mapping[int, Any]) -> list[str]:
    """["rank 2: this", "ranks 0, 1: that"]: each distinct text once, with the ranks that it belongs to."""
    ranks: dict[str, list[int]] = {}
    for rank, text in said.items():
        ranks.setdefault(str(text), []).append(rank)
    return [f"rank{'s' if len(who) > 1 else ''} {', '.join(map(str, who))}: {text}" for text, who in ranks.items()]
