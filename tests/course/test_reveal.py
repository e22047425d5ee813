"""A guess stands beside what was measured, or is refused if it can't."""

import re

import nbformat
import pytest
import torch

from scratch_ddp.commands.notebooks import lesson_paths
from scratch_ddp.course import reveal

TEXT = re.compile(r"reveal\(guess, (f['\"]|str\()")


@pytest.mark.parametrize(
    ("guess", "measured", "says"),
    [
        (None, 1500, "no guess made · measured 1,500\n"),
        (4.0, 0.8, "guess 4 · measured 0.8: 0.2 times the guess\n"),
        (10, 10.9, "guess 10 · measured 10.9: near the guess, 9% more\n"),
        (3, torch.tensor(3), "guess 3 · measured 3: as guessed\n"),
        (0, 2.5, "guess 0 · measured 2.5\n"),
        (True, False, "guess True · measured False\n"),
        ("rank 0", "rank 1", "guess rank 0 · measured rank 1\n"),
        ([1, None], [1, 4], "0: guess 1 · measured 1: as guessed\n1: no guess made · measured 4\n"),
        (((60, 40),), [[60, 40]], "0: guess [60, 40] · measured [60, 40]: as guessed\n"),
    ],
)
def test_a_guess_beside_the_measurement(guess, measured, says, capsys):
    reveal(guess, measured)
    assert capsys.readouterr().out == says
    reveal(guess, measured, "computed")
    assert capsys.readouterr().out == says.replace("measured", "computed")


@pytest.mark.parametrize(
    ("guess", "measured", "error", "says"),
    [
        ("six", 6, TypeError, "your guess 'six' is text, what was measured is a number"),
        (6, [6, 6], TypeError, "what was measured is a list"),
        ([6], [6, 6], ValueError, "your guess has 1 rows, the measurement 2"),
    ],
)
def test_nothing_is_shown_to_a_guess_of_another_kind(guess, measured, error, says, capsys):
    with pytest.raises(error, match=says):
        reveal(guess, measured)
    assert not capsys.readouterr().out


def test_no_lesson_compares_a_guess_with_a_formatted_number():
    """A formatted number is text, and a learner who types a number is refused."""
    cells = [(path.stem, cell.source) for path in lesson_paths() for cell in nbformat.read(path, as_version=4).cells]
    assert not [each for each in cells if TEXT.search(each[1])]
