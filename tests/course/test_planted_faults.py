"""Each planted fault is found from the profile, on whatever rank it is; the game says whether a guess is right."""

import pytest
import torch.distributed as dist

from scratch_ddp.course.pages.planted_faults import FAULTS, WITH_A_RANK, Game, Job, culprit, profile
from scratch_ddp.instruments.network import linked_group
from tests.ranks import run_ranks


def _named():
    group = linked_group(None)
    planted = [(fault, place % dist.get_world_size()) for place, fault in enumerate(FAULTS, start=1)]
    return [(fault, at, culprit(*profile(Job(group, fault, at), steps=3))) for fault, at in planted]


def test_every_fault_is_named():
    for found in run_ranks(4, _named):
        for fault, at, named in found:
            assert named == (fault, at if fault in WITH_A_RANK else None)


def _played():
    group, answers = linked_group(None), []
    game = Game(group, seed=5)
    for fault in FAULTS:
        answers += [game.answer(fault, rank) for rank in (None, *range(group.size()))]
    with pytest.raises(ValueError, match="your guess 'gloo' is none of loader, "):
        game.answer("gloo")
    with pytest.raises(ValueError, match="there is no fault 'gloo'"):
        Job(group, "gloo")
    named = culprit(game.timelines, game.steps)
    return answers, game.answer(None), game.answer(*named)


def test_a_guess_is_right_if_fault_and_rank_are():
    results = run_ranks(2, _played)
    assert results[0] == results[1]
    answers, without_guess, named = results[0]
    assert answers.count(True) in (1, 3)  # a rank's fault: one guess; else it does not matter which rank is named
    assert not without_guess and named
