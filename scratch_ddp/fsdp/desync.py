"""Before the ranks exchange large messages they tell each other what they are about to do.

A pass begins with one small all-reduce. If one rank begins a forward pass and another has none, all of them raise
before anything is lost, where otherwise they would wait for ever, or take each other's parameters for their own.
"""

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist

from scratch_ddp.common.accounting import set_up
from scratch_ddp.common.agreement import check_same_lines, gather_texts, message_device, rank_numbers, texts_by_rank

# What a rank may be about to do. The first two go together: a rank whose loss does not depend on the model has no
# backward pass, and takes part in the others' when it synchronises.
BACKWARD, SYNC = "begins a backward pass", "calls sync_gradients()"
FORWARD, EVALUATION = "begins a forward pass", "begins a forward pass under no_grad"
ALONE, AGAIN = "calls a unit outside of the model's forward", "calls a unit again in the same forward pass"
OTHERS = "calls another method of FSDP"
_DOINGS = (BACKWARD, SYNC, FORWARD, EVALUATION, ALONE, AGAIN, OTHERS)


class RollCall:
    """Ranks of a group that speak before they act. Each call costs one all-reduce of 8 bytes a number.

    The message goes through main memory where the group has a backend for it, as one that
    `dist.init_process_group()` makes without naming a backend has; through NCCL it waits for the GPU's work.
    """

    def __init__(self, group: dist.ProcessGroup | None, length: int):
        """`length`: the most numbers that any call exchanges, since all messages have the same size."""
        self.group, self.length = group, length

    def __call__(self, doing: str, lines: Sequence[str] = (), numbers: Sequence[int] = ()) -> tuple[str, list[int]]:
        """Return what the ranks do (BACKWARD if any does and the others synchronise), and the largest of each number.

        Raises RuntimeError on every rank where they are about to do different things, ValueError where their `lines`,
        which describe it, differ.
        """
        mine, said = _DOINGS.index(doing), digest(lines)
        row = [mine, -mine, said, -said, *numbers]
        row += [0] * (4 + self.length - len(row))
        with set_up():
            message = torch.tensor(row, dtype=torch.int64, device=message_device(self.group))
            dist.all_reduce(message, dist.ReduceOp.MAX, group=self.group)
            largest, smallest, said_largest, said_smallest, *numbers_of_all = message.tolist()
            if largest != -smallest and not max(largest, -smallest) <= 1:
                self._refuse(doing)
            if said_largest != -said_smallest:
                check_same_lines(lines, "the ranks do not go together", self.group)
        return _DOINGS[-smallest], numbers_of_all

    def _refuse(self, doing: str) -> None:
        texts = gather_texts(doing, self.group)
        said = texts_by_rank(dict(zip(rank_numbers(self.group), texts, strict=True)))
        said = [line.replace(":", "", 1) for line in said]
        raise RuntimeError(
            f"the ranks are out of step: {', '.join(said)}; every rank must do the same in the same order"
        )


def digest(lines: Sequence[str]) -> int:
    """A number that stands for the lines."""
    return int.from_bytes(hashlib.sha256("\n".join(lines).encode()).digest()[:7], "big")
