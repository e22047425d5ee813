"""The game of lesson 12 says how far a guess is right."""

from scratch_ddp.course.pages.planted_faults import FAULTS, STRAGGLER, WITH_A_RANK, Game


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
