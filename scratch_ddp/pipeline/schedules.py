"""A pipeline schedule is data: a row of actions for each rank, in the order in which the rank carries them out."""

from collections.abc import Sequence
from typing import NamedTuple


class Action(NamedTuple):
    """What a rank does with one micro-batch in one stage.

    kind: "F" forward, "B" backward, or the two halves of a backward: "I" the gradient of the stage's input, "W" the
    gradients of its weights.
    """

    kind: str
    stage: int
    micro: int

    def __str__(self) -> str:
        return f"{self.kind}{self.micro} of stage {self.stage}"


Row = Sequence[Action]
Schedule = Sequence[Row]  # a row for each rank; a stage is on one rank, stage 0 takes the inputs, the last has the loss


def gpipe(p: int, m: int) -> list[list[Action]]:
    """All m forwards, then all m backwards. Stage r is on rank r. A rank holds m activations."""
    return [[Action(kind, stage, micro) for kind in "FB" for micro in range(m)] for stage in range(p)]


def one_f_one_b(p: int, m: int, ahead: int = 1) -> list[list[Action]]:
    """p - 1 - r forwards ahead on rank r, then one forward and one backward in turn. Holds p - r activations.

    With `ahead` forwards more on each rank than on the next one, messages have time to travel.
    """
    return [
        _in_turn(
            [Action("F", stage, micro) for micro in range(m)],
            [Action("B", stage, micro) for micro in range(m)],
            ahead=ahead * (p - 1 - stage),
        )
        for stage in range(p)
    ]


def interleaved(p: int, m: int, v: int) -> list[list[Action]]:
    """1F1B with v stages on each rank, stage s on rank s % p. Groups of p micro-batches pass a rank's stages in turn.

    ValueError unless m is a multiple of p.
    """
    if m % p:
        raise ValueError(f"interleaved needs a multiple of {p} micro-batches on {p} ranks, not {m}")
    order = [(lap, first + micro) for first in range(0, m, p) for lap in range(v) for micro in range(p)]
    return [
        _in_turn(
            [Action("F", lap * p + rank, micro) for lap, micro in order],
            [Action("B", (v - 1 - lap) * p + rank, micro) for lap, micro in order],
            ahead=2 * (p - 1 - rank) + (v - 1) * p,
        )
        for rank in range(p)
    ]


def zb_h1(p: int, m: int) -> list[list[Action]]:
    """1F1B whose backward is cut in two: rank r puts each weight gradient off by r micro-batches. Holds p activations.

    From the paper "Zero Bubble Pipeline Parallelism" (Qi and others, 2023).
    """
    return [_weights_later(row, rank, m) for rank, row in enumerate(one_f_one_b(p, m))]


def _in_turn(forwards: list[Action], backwards: list[Action], ahead: int) -> list[Action]:
    """`ahead` forwards, then one forward and one backward in turn, then the other backwards."""
    ahead = min(ahead, len(forwards))
    pairs = zip(forwards[ahead:], backwards, strict=False)
    return [*forwards[:ahead], *(each for pair in pairs for each in pair), *backwards[len(forwards) - ahead :]]


def _weights_later(row: list[Action], by: int, m: int) -> list[Action]:
    later: list[Action] = []
    for kind, stage, micro in row:
        later.append(Action("I" if kind == "B" else kind, stage, micro))
        if kind == "B" and micro >= by:
            later.append(Action("W", stage, micro - by))
    return [*later, *(Action("W", by, micro) for micro in range(max(0, m - by), m))]
