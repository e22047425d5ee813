"""`measure`: time collectives on the ranks of a process group, in a rank cell or a script.

As a command on ranks of its own: `python -m scratch_ddp.benchmark collectives`.
"""

import contextlib
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from scratch_ddp.collectives.checked import agree, member_group
from scratch_ddp.common.agreement import message_device, raise_everywhere
from scratch_ddp.common.extras import extra
from scratch_ddp.common.progress import shows_progress
from scratch_ddp.instruments.bandwidth.free_memory import check_fits, places
from scratch_ddp.instruments.bandwidth.operations import FLOAT, OPERATIONS, Operation, Workspace, memory_needed
from scratch_ddp.instruments.bandwidth.results import Results, Row
from scratch_ddp.instruments.sizes import format_size, parse_size
from scratch_ddp.instruments.timing import Sample, interleaved, spread_of

SIZES = ("1KiB", "10KiB", "100KiB", "1MiB", "10MiB", "100MiB", "1GiB")
SAMPLE = 0.002  # seconds: several shorter calls make one sample, or the ranks' common start would distort it
LEAST, MOST = 3, 50  # samples per row


def measure(
    sizes: Iterable[int | str] = SIZES,
    operations: Sequence[str] = ("all_reduce",),
    ranks: Sequence[int] | None = None,
    seconds: float = 1.0,
    device: torch.device | str | None = None,
    group: dist.ProcessGroup | None = None,
) -> Results:
    """Time `operations` (names from OPERATIONS) on float32 tensors of each size, and return all rows.

    Collective: every rank of `group` calls it with the same arguments and gets the same rows. `sizes`: bytes, or texts
    such as "10MiB". `ranks`: numbers of ranks; each is measured on that many ranks, from rank 0 on; by default, on all.
    `seconds`: about how long each row may take; it has at least three samples however long they take. `device`: by
    default a GPU where the backend requires one, else the CPU.

    Operations of one size take turns after a warm-up. The ranks start each sample together, and its time is that of the
    slowest rank. The root of a broadcast and the like changes from call to call, so that no rank runs ahead.

    Raises ValueError on every rank, before anything is timed: for wrong arguments, for ranks that disagree, for sizes
    that do not fit in memory (saying which would). RuntimeError if an allocation fails later.
    """
    __tracebackhide__ = True
    plan = _Plan(sizes, operations, ranks, seconds, device, member_group(group))
    agree("measure", plan.check, plan.group)
    plan.check_fits()
    return Results(tuple(plan.run()))


@dataclass
class _Plan:
    """The arguments of `measure`. `check` replaces them by their parsed values."""

    sizes: Iterable[int | str]
    operations: Sequence[str | Operation]
    ranks: Sequence[int] | None
    seconds: float
    device: torch.device | str | None
    group: dist.ProcessGroup

    def check(self) -> dict:
        """Parse the arguments and return those that must agree on all ranks. Raises TypeError or ValueError."""
        if isinstance(self.sizes, str) or isinstance(self.operations, str):
            raise TypeError('sizes and operations are lists, such as ["1MiB"] and ["all_reduce"]')
        self.sizes = list(dict.fromkeys(parse_size(size) for size in self.sizes))
        self.operations = list(dict.fromkeys(self.operations))
        self.ranks = _counts(self.ranks, self.group)
        if unknown := [name for name in self.operations if name not in OPERATIONS]:
            raise ValueError(f"no operation is called {unknown[0]!r}; there are {', '.join(OPERATIONS)}")
        facts = {"sizes": self.sizes, "operations": self.operations, "ranks": self.ranks, "seconds": self.seconds}
        self.operations = [OPERATIONS[name] for name in self.operations]
        if not self.sizes or not self.operations:
            raise ValueError(f"nothing to measure: {len(self.sizes)} sizes, {len(self.operations)} operations")
        if min(self.sizes) < (least := FLOAT * max(self.ranks)):
            raise ValueError(
                f"{min(self.sizes)} bytes are too few: {max(self.ranks)} ranks need {least}, a float32 each"
            )
        if not (self.seconds > 0 and math.isfinite(self.seconds)):
            raise ValueError(f"seconds must be positive and finite, not {self.seconds}")
        self.device = torch.device(self.device) if self.device else message_device(self.group)
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise ValueError("device: torch finds no GPU here; leave it out to measure on the CPU")
        return facts | {"device": self.device.type, "backend": _backend(self.group, self.device)}

    def check_fits(self) -> None:
        """Raise ValueError on every rank unless all sizes fit in memory."""
        where = places(self.device, self.group)
        check_fits(self.sizes, self.ranks, where, partial(memory_needed, self.operations))

    def run(self) -> list[Row]:
        """Measure, and return rank 0's rows on every rank."""
        with extra("cells"):
            from tqdm import tqdm
        rows: list[Row] = []
        hidden = not shows_progress(self.group.rank())
        stays = not sys.stderr.isatty()  # in a cell a cleared bar would leave an empty line behind
        steps = [(n, size) for n in self.ranks for size in self.sizes]
        with tqdm(total=len(steps), disable=hidden, leave=stays, unit="size") as progress:
            for n in self.ranks:
                with _first_ranks(n, self.group) as members:
                    for size in self.sizes:
                        progress.set_description(f"{n} ranks, {format_size(size)}")
                        rows += self._rows(size, members)
                        progress.update()
        shared = [rows]
        dist.broadcast_object_list(shared, dist.get_global_rank(self.group, 0), group=self.group)
        return shared[0]

    def _rows(self, size: int, members: dist.ProcessGroup | None) -> list[Row]:
        """The rows of one size. A rank outside `members` returns none, but takes part in the check."""
        space, problem = None, None
        try:
            if members is not None:
                space = Workspace(size, members, self.device, any(each.second for each in self.operations))
        except (RuntimeError, MemoryError) as error:
            problem = f"{format_size(size)} could not be allocated: {error}"
        raise_everywhere(problem, self.group, RuntimeError)
        return _timed(space, size, self.operations, self.seconds) if space else []


def _counts(ranks: Sequence[int] | None, group: dist.ProcessGroup) -> list[int]:
    counts = [group.size()] if ranks is None else list(ranks)
    if not counts or any(isinstance(n, bool) or not isinstance(n, int) or n < 2 for n in counts):
        raise ValueError(f"ranks must be numbers of ranks, 2 or more each, not {counts}")
    if max(counts) > group.size():
        raise ValueError(f"{max(counts)} ranks asked for, and there are {group.size()}")
    if min(counts) < group.size() and group is not dist.group.WORLD:
        raise ValueError("fewer ranks than the group has can be taken of the default group only: leave `group` out")
    return list(dict.fromkeys(counts))


def _backend(group: dist.ProcessGroup, device: torch.device) -> str:
    """The group's backend for tensors on this device. Raises ValueError if it has none."""
    backends = dict(entry.split(":") for entry in dist.get_backend_config(group).split(","))
    if device.type not in backends:
        raise ValueError(f"device: the group ({dist.get_backend_config(group)}) carries no tensors of {device}")
    return backends[device.type]


@contextlib.contextmanager
def _first_ranks(n: int, group: dist.ProcessGroup) -> Iterator[dist.ProcessGroup | None]:
    """Yield a group of the first n ranks, and None on the other ranks. The group is gone after the block."""
    if n == group.size():
        yield group
        return
    members = dist.new_group(list(range(n)), backend=dist.get_backend(group))
    if group.rank() >= n:
        yield None
        return
    try:
        yield members
    finally:
        dist.destroy_process_group(members)


def _timed(space: Workspace, size: int, operations: Sequence[Operation], seconds: float) -> list[Row]:
    def several(operation: Operation, calls: int) -> None:
        for turn in range(calls):
            operation.run(space, turn % space.n)

    def take(calls: dict[str, int], **how: int) -> dict[str, list[Sample]]:
        variants = {each.name: partial(several, each, calls[each.name]) for each in operations}
        return interleaved(variants, group=space.group, **how)

    calls = dict.fromkeys((each.name for each in operations), 1)
    probe = take(calls, rounds=1, warm_up=1)
    if sum(samples[0].wall for samples in probe.values()) < seconds / 4:
        probe = take(calls, rounds=3, warm_up=0)
    # The shortest probe decides how many calls make a sample, the median one how many samples there is time for.
    calls = {name: math.ceil(min(SAMPLE / min(_walls(probe[name])), 1000)) for name in calls}
    turn = sum(calls[name] * spread_of(_walls(probe[name])).median for name in calls)
    samples = take(
        calls, rounds=min(max(int(seconds * len(calls) / turn), LEAST), MOST), warm_up=int(turn < seconds / 5)
    )
    where = {"backend": _backend(space.group, space.whole.device), "device": space.whole.device.type, "ranks": space.n}
    rows = []
    for each in operations:
        spread = spread_of([wall / calls[each.name] for wall in _walls(samples[each.name])])
        counted = {"samples": len(samples[each.name]), "calls": calls[each.name]}
        rows.append(Row(each.name, size=size, nbytes=each.nbytes(size, space.n), seconds=spread, **where, **counted))
    return rows


def _walls(samples: Sequence[Sample]) -> list[float]:
    return [sample.wall for sample in samples]
