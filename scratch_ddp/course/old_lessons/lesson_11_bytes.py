"""Lesson 11, the last exercise: the bytes that each stage of ZeRO holds."""

from itertools import product

import torch

from scratch_ddp.course.exercise import Exercise
from scratch_ddp.course.inputs.every_kind import default_float64
from scratch_ddp.course.trial import Trial
from scratch_ddp.instruments.cost.memory import STAGES


def bytes_held(parameters, n, stage):
    """Return the bytes that one of n ranks holds of weights, gradients and optimizer state together.

    An exact integer, for any n. All in float32, under AdamW, which keeps two numbers for each
    parameter. stage 0 is DDP, 1, 2 and 3 are ZeRO's. n divides the number of parameters.
    """
    # Which of the three does each stage share out?
    # answer: begin
    share = parameters // n
    weights = share if stage >= 3 else parameters
    gradients = share if stage >= 2 else parameters
    state = 2 * (share if stage >= 1 else parameters)
    return 4 * (weights + gradients + state)
    # answer: end


def examine_bytes_held(trial: Trial) -> None:
    """V: every stage, for some numbers of ranks, of which one is drawn."""
    drawn, share = (int(number) for number in torch.randint(5001, 10**6, (2,), generator=trial.generator()))
    models = (
        (1_000_000, 2),
        (7_500_000_000, 64),
        (12, 1),
        (49 * (10**17 + 1), 49),
        (3 * (10**18 + 1), 3),
        (6, 6),
        (0, 5),
        (drawn * share, drawn),
    )
    cases, expected = {}, []
    for (stage, name), (parameters, n) in product(enumerate(STAGES), models):
        seed = f", seed {trial.seed}" if n == drawn else ""
        cases[f"{name}, {parameters:,} parameters, n={n}{seed}"] = parameters, n, stage
        whole = (4, 2, 1, 0)[stage]  # numbers per parameter that are not shared out
        expected.append(4 * (whole * parameters + (4 - whole) * parameters // n))
    for result, right in zip(trial.call_each(cases), expected, strict=True):
        trial.value(result, right)
    with default_float64():
        trial.value(trial.call(12, 1, 0, case="float64 is the default dtype"), 192)


BYTES_HELD = Exercise(bytes_held, examine_bytes_held)
EXERCISES = (BYTES_HELD,)
