"""Lesson 07, what a message costs: a timer for collectives, and the forecast of a training step."""

import functools
import gc
import random
from collections.abc import Callable
from fractions import Fraction

import torch
import torch.distributed as dist

from scratch_ddp.common.accounting import set_up
from scratch_ddp.course.exercise import Exercise
from scratch_ddp.course.inputs.one_process import tried_in_worlds
from scratch_ddp.course.inputs.rehearsal import Collectives, Rehearsal, met_in_one_process
from scratch_ddp.course.trial import Trial
from scratch_ddp.course.wording import difference
from scratch_ddp.instruments.network import Link, lone_rank
from scratch_ddp.instruments.traffic.intercept import listening


def time_calls(operation, repeats, clock, device):
    """Return a list of floats: the seconds of each of `repeats` calls of operation(), in order.

    The time of a call is that of the slowest rank, so the list is the same on every rank. The ranks
    begin each of these calls together: then each looks at its clock, calls operation() and looks
    again, with nothing in between. One more call comes before them and is not in the list, since the
    first call is slower. clock() returns this rank's time in seconds, as a float64; it may differ from
    other ranks' by any amount. Times are not rounded. device: for the tensor that ranks send.
    `repeats` is at least 1. What operation() raises reaches the caller. Grad mode, gc and other
    settings of the process stay as they are throughout.
    Cost: at most one dist.barrier for each call of operation, and one dist.all_reduce.
    """
    # How do ranks begin together? Whose time counts, and how do the others get to know it?
    # answer: begin
    operation()
    taken = torch.zeros(repeats, dtype=torch.float64, device=device)
    for call in range(repeats):
        dist.barrier()
        began = clock()
        operation()
        taken[call] = clock() - began
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    times = taken.tolist()
    # answer: end
    return times


class OperationFailed(OSError, RuntimeError, ValueError):
    """What an operation raises. Whoever catches one of these kinds catches it."""


class Exhausted(StopIteration):
    """As an iterator raises it, of which operation() takes the next: generators and map() would swallow it."""


class Stop(KeyboardInterrupt):
    """As the interrupt: no Exception, so `except Exception` does not catch it."""


UNIT = 2.0**-20  # of the times that are drawn: float32 can't hold them, and sums of them are exact in float64


def examine_time_calls(trial: Trial) -> None:
    """V: the slowest rank's seconds by a clock that is known; together: a barrier, then the clock; A; C."""
    n = trial.size
    if not trial.on_all_ranks:
        seconds = [[1.0, 0.5 + other, 2.0, 7.0 - other / 2] for other in range(n)]  # of two calls with two each
        _examine_times(trial, seconds, "called twice with gradients and gc switched off, ", calls=2)
        return
    # The warm-up takes long. Of the others, another rank is the slowest each time.
    seconds = [[64.0, *(each + (other + call) % n for call, each in enumerate((2.0, 1.0, 3.0)))] for other in range(n)]
    _examine_times(trial, seconds, "")
    trial.end_if_wrong()
    _examine_times_in_worlds(trial)


def _called_from_nowhere(answer: Callable, repeats: int, device: torch.device) -> str:
    try:
        Rehearsal(0.0, [1.0] * (repeats + 1), met_in_one_process).run(answer, repeats, device)
    except RuntimeError:
        return ""
    return "the tensor that ranks send is not on `device`"


def _begins(rank: int) -> float:
    """Clocks of different ranks differ, and show seconds since 1970 or so."""
    return (-1) ** rank * 2.0**30 + 1024.0 * rank


def _examine_times(trial: Trial, seconds: list[list[float]], note: str, calls: int = 1) -> None:
    """With clocks of which each rank's seconds are known: of `calls` calls of the answer with equally many times."""
    met = Collectives()
    rehearsal = Rehearsal(_begins(trial.rank), seconds[trial.rank], met)
    repeats = len(seconds[0]) // calls - 1

    def run(answer: Callable, repeats: int, device: torch.device) -> object:
        with listening(met):
            if calls == 1:
                return rehearsal.watched(answer, repeats, device)
            threads = torch.get_num_threads()
            with torch.no_grad():
                gc.disable()
                torch.set_num_threads(threads + 1)
                try:
                    return [rehearsal.run(answer, repeats, device) for _ in range(calls)][-1]
                finally:
                    gc.enable()
                    torch.set_num_threads(threads)

    times = trial.call(repeats, trial.device, case=f"{note}repeats={repeats}", using=run)
    trial.value(times, [max(column) for column in zip(*seconds, strict=True)][-repeats:])
    made = rehearsal.calls()
    complaint = "" if made == repeats + 1 else f"was called {made} times, should be {repeats + 1}"
    trial.criterion("value", complaint, "operation")
    trial.criterion("together", rehearsal.apart(), "the time")
    trial.criterion("value", "" if rehearsal.apart() else rehearsal.between, "the time")
    trial.criterion("untouched", rehearsal.settings)
    trial.agreement(times)
    trial.cost(calls={"barrier": calls * (repeats + 1), "all_reduce": calls})


def _examine_times_in_worlds(trial: Trial) -> None:
    """The same with 1 to 9 ranks, many repeats and few, times of all magnitudes; then with operations that raise."""
    rehearsals: dict[str, list[Rehearsal]] = {}
    slowest: dict[str, list[float]] = {}
    generator = trial.generator()

    def arguments(case: str, n: int, repeats: int, error: BaseException | None, failing: int) -> list[tuple]:
        drawn = torch.randint(0, 2**30, (n, repeats + 1), generator=generator)
        drawn = drawn >> torch.randint(0, 11, (repeats + 1,), generator=generator)  # some take 1000 s, others 1 s
        drawn[:, 1:] *= torch.randint(0, 8, (repeats,), generator=generator) > 0  # and some no time at all
        drawn[:, 1:] *= "no time" not in case
        unit = UNIT * 2.0**-25 if "fast" in case else UNIT  # then float32 can hold none of the times
        seconds = (drawn.double() * unit).tolist()
        # Some clocks take time to look at: between the looks of a call passes one of them.
        looks = [unit * (rank + 1) * 2**10 if "looks" in case else 0.0 for rank in range(n)]
        slowest[case] = [max(map(sum, zip(each, looks, strict=True))) for each in zip(*seconds, strict=True)][1:]
        begins = [_begins(rank) if rank != n // 2 else 0.0 for rank in range(n)]
        if "fast" in case:  # beside 2**30 s they would be lost
            begins = [each * 2.0**-25 for each in begins]
        rehearsals[case] = [
            Rehearsal(begins[rank], seconds[rank], met_in_one_process, error, failing, looks[rank]) for rank in range(n)
        ]
        return [(rehearsal, repeats, torch.device("cpu")) for rehearsal in rehearsals[case]]

    makers = {}
    drawn = (
        ("", 1, 65 + trial.seed % 4),
        ("clocks whose looks take time, ", 2, 9 + trial.seed % 10),
        ("fast calls, ", 3 + trial.seed % 3, 4),
        ("clocks whose looks take time, ", 6 + trial.seed % 4, 3),
        ("calls that take no time, ", 2, 5),
    )
    for kind, n, repeats in drawn:
        case = f"{kind}repeats={repeats}, drawn with seed {trial.seed}"
        makers[case] = functools.partial(arguments, case, n, repeats, None, 0)
    failures = ((OperationFailed(), 1), (OperationFailed(), 2), (Stop(), 3), (Exhausted(), 5))
    for (error, failing), which in zip(failures, ("first", "second", "third", "last"), strict=True):
        case = f"operation() raises {type(error).__name__} in its {which} call"
        makers[case] = functools.partial(arguments, case, 2, 4, error, failing)
    nowhere = "device='meta', from which nothing can be sent"
    makers[nowhere] = lambda: [(None, 1, torch.device("meta"))] * 2
    for case, world in tried_in_worlds(trial, makers, using=_rehearsed):
        if case == nowhere:
            trial.criterion("value", world.results[0], world.place)
            continue
        for rank, (rehearsal, result) in enumerate(zip(rehearsals[case], world.results, strict=True)):
            what = f"{world.place} rank {rank}"
            if "raises" in case:
                trial.criterion("value", result, what)
                continue
            trial.criterion("value", _difference_of_times(result, slowest[case]), f"{what}'s result")
            made, should = rehearsal.calls(), len(slowest[case]) + 1
            complaint = "" if made == should else f"calls operation() {made} times, should be {should}"
            trial.criterion("value", complaint, what)
            trial.criterion("together", rehearsal.apart(), f"{what}: the time")
        trial.criterion(
            "cost",
            world.over_budget({"barrier": len(slowest[case]) + 1, "all_reduce": 1}, MANY_BYTES),
            world.place,
        )


MANY_BYTES = 2**20  # the budget is of calls


def _rehearsed(answer: Callable, rehearsal: Rehearsal | None, repeats: int, device: torch.device) -> object:
    if rehearsal is None:
        return _called_from_nowhere(answer, repeats, device)
    return rehearsal.raises(answer, repeats, device) if rehearsal.fails else rehearsal.run(answer, repeats, device)


def _difference_of_times(times: object, expected: list[float]) -> str:
    """As `difference`, but of long lists only the first entry that differs."""
    if not isinstance(times, list) or len(expected) < 4:
        return difference(times, expected)
    if len(times) != len(expected):
        return f"has {len(times)} entries, should have {len(expected)}"
    told = (difference(*pair) for pair in zip(times, expected, strict=True))
    return next((f"at entry {i} {text}" for i, text in enumerate(told) if text), "")


TIME_CALLS = Exercise(time_calls, examine_time_calls)


def forecast_step(gradients, timed, n):
    """Return the seconds, a float (or 0), that a step of n ranks spends in its all-reduces.

    There is one all-reduce for each gradient, and they come one after another. gradients: a list
    with the bytes of each, perhaps empty. timed: {bytes: seconds} of two all-reduces that were timed
    on the same link, between 2 ranks; either may come first. n is at least 2. An all-reduce takes α
    seconds, the same for any n and any gradient, even one of 0 bytes, and β for each byte that a
    rank sends; one of the two may be 0. Calculate in float64, as Python does, and round nothing.
    Cost: nothing is sent.
    """
    # What do two times say about α and β? How many bytes does a rank send if there are n?
    # answer: begin
    (small, small_seconds), (large, large_seconds) = sorted(timed.items())
    beta = (large_seconds - small_seconds) / (large - small)  # of 2 ranks, each sends all bytes
    alpha = small_seconds - beta * small
    sent = 2 * (n - 1) / n * sum(gradients)
    seconds = alpha * len(gradients) + beta * sent
    # answer: end
    return seconds


def _on_a_link(n: int, link: Link, sizes: list[int]) -> list[float]:
    """The seconds of all-reduces of these sizes, in bytes, on one rank of n."""
    with set_up():
        group = lone_rank(n, link)
        for size in sizes:
            dist.all_reduce(torch.zeros(size // 4), group=group)
        seconds = [transfer.ended - transfer.started for transfer in group.transfers]
        dist.destroy_process_group(group)
    return seconds


def _calculated(n: int, link: Link, sizes: list[int]) -> list[float]:
    """The same without tensors: for sizes that are too large, or not of whole float32 numbers."""
    return [link.seconds(2 * (n - 1) / n * size) for size in sizes]


def examine_forecast_step(trial: Trial) -> None:
    """V: a step of several models, on several links, with several numbers of ranks, as the simulated link has it; C."""
    few, many = [4_000_000], [4 * (1 + size % 7) for size in range(40)] + [100_000]
    given = {4_000: 1.04e-4, 400_000: 5e-4}  # α = 100 µs, β = 1 ns
    seconds = trial.call(list(few), dict(given), 2, case="1 gradient, n=2")
    trial.criterion("value", _difference(seconds, _step(_on_a_link, few, given, 2), 1e-5), "the result")
    trial.cost(calls={})
    if trial.calls:  # it measures, and some of the next are too large for that
        return
    cases = {
        "41 gradients, n=2": (many, dict(reversed(given.items())), 2),
        "1 gradient, n=4": (few, {4_000: 2.8e-5, 400_000: 8.2e-4}, 4),
        "2 gradients of 3 and 5 GiB, α = 2 s, n=3": ([3 * 2**30, 5 * 2**30], {2: 2 + 6e-9, 10**9: 5.0}, 3),
        "0 gradients, n=4": ([], given, 4),
        "2 gradients of 0 bytes, n=4": ([0, 0], given, 4),
        "41 gradients, n=3, α = 0": (many, {2**20: 2.0**-20, 0: 0.0}, 3),
        "41 gradients, n=3, β = 0": (many, {2**20: 1e-3, 0: 1e-3}, 3),
        "41 gradients, n=3, α is 0, or below by rounding": (many, {3021: 3021 * 3.03e-10, 303: 303 * 3.03e-10}, 3),
    } | _drawn_steps(trial)
    called = trial.call_each({case: (list(given[0]), dict(given[1]), given[2]) for case, given in cases.items()})
    for (gradients, timed, n), seconds in zip(cases.values(), called, strict=True):
        expected = _step(_calculated, gradients, timed, n)
        rounded = 1e-14 * max(timed.values()) * len(gradients)  # where α is the difference of larger numbers
        trial.criterion("value", _difference(seconds, expected, 1e-11, rounded), "the result")
    trial.cost(calls={})


def _step(seconds_of: Callable, gradients: list[int], timed: dict[int, float], n: int) -> float:
    (small, first), (large, second) = sorted(timed.items())
    beta = Fraction(second - first) / (large - small)
    return float(sum(seconds_of(n, Link(max(0.0, float(Fraction(first) - beta * small)), float(beta)), gradients)))


def _drawn_steps(trial: Trial) -> dict[str, tuple[list[int], dict[int, float], int]]:
    """Steps of all magnitudes, each with others that differ from it in one thing only."""
    generator, steps = random.Random(trial.seed), {}

    def add(gradients: list[int], timed: dict[int, float], n: int) -> None:
        number = f"{len(gradients)} gradient{'s' if len(gradients) != 1 else ''}"
        case = f"{number}, n={n}, step {len(steps)} drawn with seed {trial.seed}"
        steps[case] = gradients, timed, n

    # Of few bytes, one more or less makes a difference. Ranks: a few, thousands, a million.
    for longest, magnitude, ranks in ((3, 3, (1, 6)), (40, 30, (6, 16)), (300, 30, (20, 30))):
        number = generator.randint(max(2, longest - 40), longest)
        gradients = [int(2 ** generator.uniform(0, magnitude)) for _ in range(number)]
        gradients += [*generator.sample(gradients, 2), 0, 1]
        small = int(2 ** generator.uniform(2, min(24, magnitude + 3)))
        large = int(small * generator.uniform(1.25, 64)) + 1
        gradients += [small, large]  # of n ranks they take another time than the one that was measured
        alpha, n = 10 ** generator.uniform(-12, 0), int(2 ** generator.uniform(*ranks))
        beta = alpha / large * 2 ** generator.uniform(-3, 3)
        first, second = alpha + beta * small, alpha + beta * large
        timed = {large: second, small: first} if generator.random() < 0.5 else {small: first, large: second}
        add(gradients, timed, n)
        add(gradients, timed, n + 1)
        add(gradients, timed | {small: alpha / 2 + (second - alpha / 2) / large * small}, n)
        add(gradients, timed | {large: alpha / 2 + (first - alpha / 2) / small * large}, n)
        add([*gradients[1:], gradients[0] + 1], timed, 2)
    add([each % 1000 for each in gradients] * 4, timed, 2)
    for one in (small // 2, (small + large) // 2, 2 * large):  # no step takes a time that was measured
        add([one], timed, 2)
    return steps


def _difference(seconds: object, expected: float, tolerance: float, rounded: float = 0.0) -> str:
    if not isinstance(seconds, (int, float)):
        return difference(seconds, expected)
    if abs(seconds - expected) <= tolerance * expected + rounded:
        return ""
    digits = 6 if f"{seconds:.6g}" != f"{expected:.6g}" else 17
    return f"is {seconds:.{digits}g}, should be {expected:.{digits}g}"


FORECAST_STEP = Exercise(forecast_step, examine_forecast_step, also_named=("transfer_seconds", "ring_bytes"))
EXERCISES = (TIME_CALLS, FORECAST_STEP)
