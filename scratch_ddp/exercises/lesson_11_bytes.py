"""Lesson 11, ZeRO and FSDP: what a rank holds at each stage, in bytes."""

from scratch_ddp.cost.memory import STAGES, model_states
from scratch_ddp.exercises.exercise import Exercise, WrongAnswer
from scratch_ddp.exercises.trial import Trial


def bytes_held(parameters, n, stage):
    """Return the bytes that one of n ranks holds of weights, gradients and optimizer state together.

    An integer. All in float32, under AdamW, which keeps two numbers for each parameter. stage 0
    is DDP, 1, 2 and 3 are ZeRO's. n divides the number of parameters.
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
    """V: every stage, for some numbers of ranks; the same formulas as the package's."""
    for stage, name in enumerate(STAGES):
        for parameters, n in ((1_000_000, 2), (7_500_000_000, 64), (12, 1)):
            result = trial.call(parameters, n, stage, case=f"{name}, {parameters:,} parameters, n={n}")
            trial.value(result, round(model_states(parameters, n, name).total))


BYTES_HELD = Exercise(
    bytes_held,
    examine_bytes_held,
    wrong=(
        WrongAnswer(
            "ZeRO-1 shares out the gradients too",
            fails="value",
            says="ZeRO-1, 1,000,000 parameters, n=2: the result is 10000000, should be 12000000.",
            edits={"share if stage >= 2": "share if stage >= 1"},
        ),
        WrongAnswer(
            "one number of state a parameter",
            fails="value",
            says="DDP, 1,000,000 parameters, n=2: the result is 12000000, should be 16000000.",
            edits={"2 * (share": "(share"},
        ),
        WrongAnswer(
            "ZeRO-3 keeps the weights whole",
            fails="value",
            says="ZeRO-3, 1,000,000 parameters, n=2: the result is 10000000, should be 8000000.",
            edits={"weights = share if stage >= 3 else parameters": "weights = parameters"},
        ),
        WrongAnswer(
            "counts numbers, not bytes",
            fails="value",
            says="DDP, 1,000,000 parameters, n=2: the result is 4000000, should be 16000000.",
            edits={"return 4 * ": "return "},
        ),
    ),
)
EXERCISES = (BYTES_HELD,)
