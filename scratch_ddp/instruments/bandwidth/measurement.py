"""`measure`: time collectives on the ranks of a process group, in a rank cell or a script.

As a command on ranks of its own: `python -m scratch_ddp.benchmark collectives`.
"""

import contextlib
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch.distributed as dist

from scratch_ddp.collectives.checked import member_group
from scratch_ddp.common.agreement import message_device
from scratch_ddp.common.extras import extra
from scratch_ddp.common.progress import shows_progress
from scratch_ddp.instruments.bandwidth.operations import OPERATIONS, Operation, Workspace
from scratch_ddp.instruments.bandwidth.results import Results, Row
from scratch_ddp.instruments.sizes import format_size, parse_size
from scratch_ddp.instruments.timing import interleaved, spread_of

SIZES = ("1KiB", "10KiB", "100KiB", "1MiB", "10MiB", "100MiB", "1GiB")
SAMPLE = 0.002  # seconds: several shorter calls make one sample, or the ranks' common start would distort it
LEAST, MOST = 3, 50  # samples per row


def measure(
    sizes: Iterable[int | str] = SIZES,
    operations: Sequence[str] = ("all_reduce",),
    ranks: Sequence[int] | None = None,
    seconds: float = 1.0,
    group: dist.ProcessGroup | None = None,
) -> Results:
    """Time `operations` (names from OPERATIONS) on float32 tensors of each size, and return all rows.

    Collective: every rank of `group` calls it with the same arguments and gets the same rows. `sizes`: bytes, or texts
    such as "10MiB". `ranks`: numbers of ranks; each is measured on that many ranks, from rank 0 on (of the default
    group); by default, on all. `seconds`: about how long each row may take; it has at least three samples however long
    they take. The tensors are on a GPU where the backend requires one, else in main memory.

    Operations of one size take turns after a warm-up. The ranks start each sample together, and its time is that of the
    slowest rank.

    Raises ValueError for a text that is no size, and for more ranks than there are.
    """
    __tracebackhide__ = True
    group = member_group(group)
    sizes, counts = [parse_size(size) for size in sizes], ranks or [group.size()]
    chosen = {name: OPERATIONS[name] for name in operations}
    rows: list[Row] = []
    with _progress(len(counts) * len(sizes), group) as progress:
        for n in counts:
            with _first_ranks(n, group) as members:
                for size in sizes:
                    progress.set_description(f"{n} ranks, {format_size(size)}")
                    if members is not None:
                        rows += _timed(Workspace(size, members, message_device(group)), size, chosen, seconds)
                    progress.update()
    shared = [rows]
    dist.broadcast_object_list(shared, group=group, group_src=0)
    return Results(tuple(shared[0]))


def _progress(total: int, group: dist.ProcessGroup) -> Any:
    """A bar on the first rank."""
    with extra("cells"):
        from tqdm import tqdm
    stays = not sys.stderr.isatty()  # in a cell a cleared bar would leave an empty line behind
    return tqdm(total=total, disable=not shows_progress(group.rank()), leave=stays, unit="size")


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


def _timed(space: Workspace, size: int, operations: Mapping[str, Operation], seconds: float) -> list[Row]:
    def several(run: Callable[[Workspace], object], calls: int) -> None:
        for _ in range(calls):
            run(space)

    def take(calls: Mapping[str, int], **how: int) -> dict[str, list[float]]:
        variants = {name: partial(several, each.run, calls[name]) for name, each in operations.items()}
        samples = interleaved(variants, group=space.group, **how)
        return {name: [each.wall for each in samples[name]] for name in samples}

    probe = take(dict.fromkeys(operations, 1), rounds=3, warm_up=1)
    # The shortest probe decides how many calls make a sample, the median one how many samples there is time for.
    calls = {name: math.ceil(min(SAMPLE / min(walls), 1000)) for name, walls in probe.items()}
    turn = sum(calls[name] * spread_of(walls).median for name, walls in probe.items())
    rounds = min(max(int(seconds * len(calls) / turn), LEAST), MOST)
    samples = take(calls, rounds=rounds, warm_up=0)
    rows = []
    for name, each in operations.items():
        spread = spread_of([wall / calls[name] for wall in samples[name]])
        nbytes = each.nbytes(size, space.n)
        rows.append(Row(name, dist.get_backend(space.group), space.n, size, nbytes, spread, rounds, calls[name]))
    return rows
