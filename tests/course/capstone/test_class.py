"""The capstone's judge of a class: it earns everything or is refused by the right criterion, and nothing hangs."""

import time
from pathlib import Path

import pytest

from scratch_ddp.commands import grade as grading
from scratch_ddp.course.capstone import criteria, real_loop, trials
from scratch_ddp.course.capstone.torchrun import Ended
from tests.course.capstone.wrong_classes import BORROWED, NOT_ON_RANKS, ONLY_VALUE, WRONG_CLASSES

REFERENCE = Path(trials.__file__).with_name("reference_class.py")


def edited(folder: Path, edits: dict[str, str]) -> Path:
    source = REFERENCE.read_text()
    for old, new in edits.items():
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    path = folder / "my_ddp.py"
    path.write_text(source)
    return path.resolve()


def test_the_reference_earns_everything_also_under_torchrun_and_a_killed_rank(tmp_path, capsys):
    assert len(REFERENCE.read_text().splitlines()) <= 120
    assert grading.main([str(edited(tmp_path, {}))]) == 0
    printed = capsys.readouterr().out
    assert f"{len(trials.PROMISES)} of {len(trials.PROMISES)} criteria hold." in printed
    assert printed.count("✓") == len(trials.PROMISES) and "✗" not in printed


@pytest.mark.parametrize("name", WRONG_CLASSES)
def test_a_wrong_class_is_refused_by_the_right_criterion(name, tmp_path):
    edits, expected = WRONG_CLASSES[name]
    limit, names = (1.5, expected) if name in ONLY_VALUE else (5.0, criteria.ON_RANKS)
    began = time.monotonic()
    found = trials.on_ranks(edited(tmp_path, edits), limit, names)
    assert time.monotonic() - began < 30
    assert {each for each, complaint in found.items() if complaint} == set(expected), found
    for each, words in expected.items():
        assert words in found[each]


@pytest.mark.parametrize("source, says", NOT_ON_RANKS.items())
def test_a_file_without_the_class_fails_every_criterion(source, says, tmp_path):
    path = tmp_path / "my_ddp.py"
    path.write_text(source)
    found = trials.judge(path, limit=1.0)
    assert list(found) == list(trials.PROMISES) and all(says in complaint for complaint in found.values())


@pytest.mark.parametrize("source, says", BORROWED.items())
def test_borrowed_work_is_not_the_learners_own(source, says, tmp_path):
    path = tmp_path / "my_ddp.py"
    path.write_text(source)
    assert trials.problem_of(path) == "" and says in trials.borrowed_by(path)


LOSSES = {step: {"loss": 1.0} for step in range(1, real_loop.STEPS + 1)}
FIRST = {step: LOSSES[step] for step in range(1, real_loop.KILL_AT)}
WORLD = "ValueError: the items are shared over 2 ranks, but 1 train the model"
RESUMED = ["resumed after step 4 (saved/step_00000004)"]


@pytest.mark.parametrize(
    "steps, was_killed, ended, torchrun_says, interrupted_says",
    [
        (LOSSES, True, Ended(0, {}, RESUMED), "", ""),
        ({}, False, Ended(1, {}, [WORLD]), f"it ended with status 1: {WORLD}", "the run did not come so far"),
        ({}, False, Ended(1, {}, ["RuntimeError: Connection closed", WORLD]), WORLD, "the run did not come so far"),
        (FIRST, True, Ended(1, {0: "waits at x"}, []), "", "rank 0 waits at x"),
        (FIRST, True, Ended(None, {}, []), "", "it had not ended after 240 seconds"),
        (LOSSES, True, Ended(0, {}, []), "", "the run did not go on from its checkpoint"),
        (FIRST, True, Ended(0, {}, RESUMED), "", "only 5 of 12 steps were made"),
        (
            LOSSES | {3: {"loss": 2.0}},
            True,
            Ended(0, {}, RESUMED),
            "step 3: loss 2.000000; one process has 1.00000",
            "",
        ),
    ],
)
def test_what_is_said_of_the_run_under_torchrun(steps, was_killed, ended, torchrun_says, interrupted_says):
    found = real_loop.complaints(LOSSES, steps, was_killed, ended)
    for complaint, says in zip(found.values(), (torchrun_says, interrupted_says), strict=True):
        assert says in complaint and bool(says) == bool(complaint)


def test_a_file_that_is_not_there_is_refused(tmp_path, capsys):
    assert grading.main([str(tmp_path / "my_ddp.py")]) == 2
    assert "there is no such file" in capsys.readouterr().err
