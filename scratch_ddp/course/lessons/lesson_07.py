"""Lesson 07, what a message costs: a timer for collectives, and the forecast of a training step."""

from collections.abc import Callable

import torch
import torch.distributed as dist

from scratch_ddp.common.accounting import set_up
from scratch_ddp.course.exercise import Exercise
from scratch_ddp.course.trial import Trial
from scratch_ddp.instruments.network import Link, lone_rank
from scratch_ddp.instruments.traffic import traffic


def time_calls(operation, repeats, clock, device):
    """Return a list with the seconds that each of `repeats` calls of operation() takes.

    The time of a call is that of the slowest rank, so the list is the same on every rank.
    The ranks begin each of these calls together. One call comes before them and is not in
    the list, since the first call is slower than others. clock() returns this rank's time
    in seconds; it may differ from other ranks' by any amount. device: where tensors go.
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


class _Rehearsal:
    """An operation and a clock of which every second is known, and a record of what was done when."""

    def __init__(self, rank: int, seconds: list[float]):
        # Clocks of different ranks differ, and show seconds since 1970 or so, which float32 could not tell apart.
        self._now, self._seconds = 2.0**30 + 1024.0 * rank, iter(seconds)
        self._events: list[tuple[str, int]] = []  # ("call" or "look", how often the ranks have met before it)

    def run(self, answer: Callable, repeats: int, device: torch.device) -> object:
        with traffic() as self._counted:
            return answer(self._operation, repeats, self._clock, device)

    def _note(self, what: str) -> None:
        self._events.append((what, sum(self._counted.calls.get(name, 0) for name in ("barrier", "all_reduce"))))

    def _operation(self) -> None:
        self._note("call")
        self._now += next(self._seconds, 1.0)

    def _clock(self) -> float:
        self._note("look")
        return self._now

    def calls(self) -> int:
        return sum(what == "call" for what, _ in self._events)

    def apart(self) -> str:
        """In what call the ranks don't begin together, as a complaint; "" if they always do, but for the first."""
        last_call, last_look, number = -1, -1, 0
        for what, met in self._events:
            if what == "look":
                last_look = met
                continue
            if number and met > last_look:
                return f"of call {number} on the clock has the barrier in it"
            if number and last_look <= last_call:
                return f"of call {number} on the clock does not begin with a barrier"
            last_call, number = met, number + 1
        return ""


def examine_time_calls(trial: Trial) -> None:
    """V: the slowest rank's seconds by a clock that is known; together: a barrier, then the clock; A; C."""
    n, generator = trial.size, trial.generator()
    for repeats in (3, 1, 6):
        # The first call takes long. Of the others, another rank is the slowest each time. Sums of 1/1024 s are exact.
        drawn = torch.randint(0, 1024, (repeats,), generator=generator).tolist()
        seconds = [
            [64.0, *(1 + call + (rank + call) % n + drawn[call] / 1024 * (repeats > 3) for call in range(repeats))]
            for rank in range(n)
        ]
        rehearsal = _Rehearsal(trial.rank, seconds[trial.rank])
        case = f"repeats={repeats}{f', seconds drawn with seed {trial.seed}' if repeats > 3 else ''}"
        times = trial.call(repeats, trial.device, case=case, using=rehearsal.run)
        slowest = [max(column) for column in zip(*seconds, strict=True)]
        trial.value(times, slowest[1:])
        made = rehearsal.calls()
        complaint = "" if made == repeats + 1 else f"was called {made} times, should be {repeats + 1}"
        trial.criterion("value", complaint, "operation")
        trial.criterion("together", rehearsal.apart(), "the time")
        trial.agreement(times)
        trial.cost(calls={"barrier": repeats + 1, "all_reduce": 1})


TIME_CALLS = Exercise(time_calls, examine_time_calls)


def forecast_step(gradients, timed, n):
    """Return the seconds, a float, that a training step of n ranks spends in its all-reduces.

    There is one all-reduce for each gradient, and they come one after another. gradients:
    the bytes of each. timed: {bytes: seconds} of two all-reduces that were timed on the
    same link, between 2 ranks. Each takes α seconds, and β for each byte that a rank sends.
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


def examine_forecast_step(trial: Trial) -> None:
    """V: a step of several models, on several links, with several numbers of ranks, as the simulated link has it; C."""
    few, many = [4_000_000], [4 * (1 + size % 7) for size in range(40)] + [100_000]
    for n, gradients, link in (
        (2, few, Link(1e-4, 1e-9)),
        (2, many, Link(1e-4, 1e-9)),
        (4, few, Link(2e-5, 2e-9)),
        (64, many, Link(5e-5, 5e-9)),
    ):
        sizes = [4_000, 400_000]
        timed = dict(zip(sizes, _on_a_link(2, link, sizes), strict=True))
        case = f"{len(gradients)} gradient{'s' if len(gradients) > 1 else ''}, n={n}"
        seconds = trial.call(gradients, timed, n, case=case, using=_as_tensor)
        expected = torch.tensor(sum(_on_a_link(n, link, gradients)), dtype=torch.float64)
        trial.value(seconds, expected, "the result", tolerance=1e-5)
        trial.cost(calls={})


def _as_tensor(answer: Callable, *args: object) -> object:
    """A float as a tensor, for which `value` has a tolerance."""
    seconds = answer(*args)
    return torch.tensor(seconds, dtype=torch.float64) if isinstance(seconds, float) else seconds


FORECAST_STEP = Exercise(forecast_step, examine_forecast_step)
EXERCISES = (TIME_CALLS, FORECAST_STEP)
