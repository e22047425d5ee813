"""Ranks that would do different things find out before they exchange large messages, and all of them raise.

Before it acts, every rank says in one small all-reduce what it is about to do. Without that, a rank that begins a
forward pass while another one saves the model would wait for ever, or take the other's message for its own parameters.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch.distributed as dist

from scratch_ddp.common.accounting import set_up
from scratch_ddp.common.agreement import check_same_lines, compare, digest, gather_texts, rank_numbers, texts_by_rank


class Action(enum.Enum):
    """What a rank may be about to do."""

    BACKWARD = "begins a backward pass"
    SYNC = "calls sync_gradients()"
    FORWARD = "begins a forward pass"
    EVALUATION = "begins a forward pass under no_grad"
    UNIT_ALONE = "calls a unit outside of the model's forward"
    UNIT_AGAIN = "calls a unit again in the same forward pass"
    METHOD = "calls another method of FSDP"
    STEP = "begins a step of the optimizer"

    @property
    def number(self) -> int:
        """Equal for actions that go together.

        A rank whose loss does not depend on the model has no backward pass: it takes part in the others' when it
        synchronises.
        """
        return list(Action).index(Action.SYNC if self is Action.BACKWARD else self)


@dataclass
class Intent:
    """What a rank says before it acts."""

    action: Action
    details: Sequence[str]  # lines that have to be the same on every rank
    order: Sequence[str]  # names of units, as the last forward pass came to them
    turns: int  # how often a unit may come up in the next backward
    has_problem: bool  # it can't act, and will raise
    was_interrupted: bool  # in its last pass
    flags: Sequence[int]  # of one length, whatever the action: messages of different sizes would end the process


class Agreed(NamedTuple):
    """What all ranks have said, the same on every rank."""

    action: Action  # BACKWARD if any rank begins a backward pass while others synchronise
    same_order: bool
    turns: int  # the most of any rank
    has_problem: bool  # on any rank
    was_interrupted: bool  # on any rank
    flags: list[int]  # the largest of any rank, each


def agree(mine: Intent, group: dist.ProcessGroup | None) -> Agreed:
    """Compare what the ranks are about to do.

    Raises RuntimeError on every rank where actions do not go together, ValueError where their details differ. Costs
    one all-reduce of 80 bytes and 8 per flag, see `compare`.
    """
    same = {"action": mine.action.number, "details": digest(mine.details), "order": digest(mine.order)}
    numbers = {
        "backward": mine.action is Action.BACKWARD,
        "turns": mine.turns,
        "problem": mine.has_problem,
        "interrupted": mine.was_interrupted,
    }
    largest, different, flags = compare(group, same, numbers, mine.flags)
    if "action" in different:
        raise RuntimeError(_out_of_step(mine.action, group))
    if "details" in different:
        check_same_lines(mine.details, "the ranks are about to do different things", group)
    return Agreed(
        Action.BACKWARD if largest["backward"] else mine.action,
        "order" not in different,
        largest["turns"],
        bool(largest["problem"]),
        bool(largest["interrupted"]),
        flags,
    )


def _out_of_step(mine: Action, group: dist.ProcessGroup | None) -> str:
    with set_up():
        texts = gather_texts(mine.value, group)
    said = texts_by_rank(dict(zip(rank_numbers(group), texts, strict=True)))
    said = ", ".join(line.replace(":", "", 1) for line in said)
    return f"the ranks are out of step: {said}; every rank must do the same in the same order"
