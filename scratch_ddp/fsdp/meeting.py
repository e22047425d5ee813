"""Before the ranks exchange large messages they meet: each says what it is about to do, and all raise if it differs.

Without that, a rank that begins a forward pass while another one saves the model would wait for ever, or take the
other's message for its own parameters.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch.distributed as dist

from scratch_ddp.common.agreement import check_same_lines, compare, digest, said_by_ranks

FORWARD, EVALUATION = "begins a forward pass", "begins a forward pass under no_grad"
BACKWARD, SYNC = "begins a backward pass", "calls sync_gradients()"
AGAIN, ALONE = "calls a unit again in the same forward pass", "calls a unit outside of the model's forward"
STEP = "begins a step of the optimizer"


class Agreed(NamedTuple):
    """What the ranks have said, the same on every rank."""

    begins_backward: bool  # on any rank, while others may call sync_gradients()
    again: bool  # on any rank it is not the first pass of a backward
    same_order: bool  # all ranks have used the units in the same order
    flags: list[int]  # the largest of any rank, each
    interruptions: str  # of any ranks, or ""


def meet(
    group: dist.ProcessGroup | None,
    lines: Sequence[str],
    flags: Sequence[int],
    order: str,
    again: bool,
    problem: str | None,
    interruption: str | None,
) -> Agreed:
    """Compare with all ranks what they are about to do.

    `lines`: the action, then what else has to be the same on every rank. `flags`: equally many at every call, since
    messages of different sizes would end the process. `problem`: why this rank can't do it. `interruption`: which pass
    of this rank did not reach its end. A backward pass goes together with `sync_gradients()`: a rank whose loss does
    not depend on the model takes part in the others' pass when it synchronises.
    Raises on every rank: ValueError if any has a problem or lines differ, RuntimeError where actions do not go
    together. Costs one all-reduce of 80 bytes and 8 per flag.
    """
    action, *others = lines
    compared = ["a backward pass or sync_gradients()" if action in (BACKWARD, SYNC) else action, *others]
    same = {"action": digest(compared[:1]), "lines": digest(compared), "order": digest([order])}
    numbers = {"problem": problem is not None, "interruption": interruption is not None}
    numbers |= {"backward": action == BACKWARD, "again": again}
    largest, different, flags = compare(group, same, numbers, flags)
    if largest["problem"]:
        raise ValueError("\n".join(said_by_ranks(problem or "", group)))
    interruptions = "\n".join(said_by_ranks(interruption or "", group)) if largest["interruption"] else ""
    if "action" in different:
        said = ", ".join(line.replace(":", "", 1) for line in said_by_ranks(action, group))
        said = f"the ranks are out of step: {said}; every rank must do the same in the same order"
        raise RuntimeError("\n".join(filter(None, [interruptions, said])))
    if "lines" in different:
        check_same_lines(compared, f"{interruptions}\nthe ranks are about to do different things".strip(), group)
    begins_backward, again = bool(largest["backward"]), bool(largest["again"])
    return Agreed(begins_backward, again, "order" not in different, flags, interruptions)
