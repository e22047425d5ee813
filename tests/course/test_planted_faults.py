"""Each planted fault is found from the profile, on whatever rank it is; the game says how far a guess is right."""

import torch.distributed as dist

from scratch_ddp.course.lessons.lesson_12 import culprit
from scratch_ddp.course.pages.planted_faults import FAULTS, STRAGGLER, WITH_A_RANK, Game, Job, in_seconds, profile
from scratch_ddp.instruments.network import linked_group
from tests.ranks import run_ranks


def _named():
    group = linked_group(None)
    planted = [(fault, place % dist.get_world_size()) for place, fault in enumerate(FAULTS, start=1)]
    return [(fault, at, culprit(*in_seconds(*profile(Job(group, fault, at), steps=3)))) for fault, at in planted]


def test_every_fault_is_named():
    for found in run_ranks(4, _named):
        for fault, at, named in found:
            assert named == (fault, at if fault in WITH_A_RANK else None)


def test_a_guess_is_right_if_fault_and_rank_are(capsys):
    game = object.__new__(Game)  # without its profile
    for planted in FAULTS:
        game._fault, game._at = planted, 1
        right = [guess for guess in ((fault, rank) for fault in FAULTS for rank in (None, 0, 1)) if game.answer(*guess)]
        assert right == ([(planted, 1)] if planted in WITH_A_RANK else [(planted, rank) for rank in (None, 0, 1)])
    capsys.readouterr()
    game._fault = STRAGGLER
    assert [game.answer(*guess) for guess in ((STRAGGLER, 0), ("gloo", 1), (None, None))] == [False] * 3
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "Right fault, wrong rank: try again." and printed[2] == "It was: straggler on rank 1."
    assert printed[1].startswith("Not gloo: try again.")
