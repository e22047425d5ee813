"""Lesson 07, what a message costs: a timer for collectives, and the forecast of a training step."""

import gc
from collections.abc import Callable

import torch
import torch.distributed as dist

from scratch_ddp.common.accounting import set_up
from scratch_ddp.course.exercise import Exercise
from scratch_ddp.course.trial import Trial
from scratch_ddp.course.wording import difference
from scratch_ddp.instruments.network import Link, lone_rank
from scratch_ddp.instruments.traffic import traffic


def time_calls(operation, repeats, clock, device):
    """Return a list of the seconds that each of `repeats` calls of operation() takes, in order.

    The time of a call is that of the slowest rank, so the list is the same on every rank. The ranks
    begin each of these calls together. One more call comes before them and is not in the list, since
    the first call is slower. clock() returns this rank's time in seconds; it may differ from other
    ranks' by any amount. device: where the tensor is that ranks send. `repeats` is at least 1. What
    operation() raises reaches the caller. Settings of the process (gradients, gc) stay as they are.
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

    def __init__(self, rank: int, seconds: list[float], error: BaseException | None = None):
        # Clocks of different ranks differ, and show seconds since 1970 or so, which float32 could not tell apart.
        self._now, self._seconds, self._error = (-1) ** rank * 2.0**30 + 1024.0 * rank, iter(seconds), error
        self._events: list[tuple[str, int]] = []  # ("call" or "look", how often the ranks have met before it)
        self.settings = ""  # what is wrong with the settings of the process

    def run(self, answer: Callable, repeats: int, device: torch.device) -> object:
        with traffic() as self._counted:
            times = answer(self._operation, repeats, self._clock, device)
        if not gc.isenabled():
            gc.enable()
            self.settings = "leaves garbage collection switched off"
        return times

    def raises(self, answer: Callable, repeats: int, device: torch.device) -> str:
        """What is wrong with the end of a call in which the operation raises; "" if that reaches the caller."""
        try:
            self.run(answer, repeats, device)
        except type(self._error):
            return ""
        return f"returned, should raise {type(self._error).__name__}"

    def _note(self, what: str) -> None:
        self._events.append((what, sum(self._counted.calls.get(name, 0) for name in ("barrier", "all_reduce"))))

    def _operation(self) -> None:
        self._note("call")
        self._now += next(self._seconds, 1.0)
        if torch.is_inference_mode_enabled() or not torch.is_grad_enabled():
            self.settings = "calls operation() with gradients switched off"
        if self._error and self.calls() == 3:
            raise self._error

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


class OperationFailed(RuntimeError):
    """What an operation raises."""


class Stop(KeyboardInterrupt):
    """As the interrupt: no Exception, so `except Exception` does not catch it."""


def examine_time_calls(trial: Trial) -> None:
    """V: the slowest rank's seconds by a clock that is known; together: a barrier, then the clock; A; C."""
    n, generator = trial.size, trial.generator()
    for repeats in (3, 1, 5 + trial.seed % 4) if trial.on_all_ranks else (3,):
        # The warm-up takes long. Of the others, another rank is the slowest each time. Sums of 1/1024 s are exact.
        least = torch.tensor([2.0, 1.0, 3.0])[:repeats]
        if repeats > 3:  # some take hundreds of times as long as others, and one takes no time at all
            least = torch.randint(0, 1024, (repeats,), generator=generator) / 1024
            least += 4 * 8 ** torch.randint(0, 4, (repeats,), generator=generator)
        seconds = [[64.0, *(each + (rank + call) % n for call, each in enumerate(least.tolist()))] for rank in range(n)]
        for each in seconds if repeats > 3 else ():
            each[repeats // 2] = 0.0
        rehearsal = _Rehearsal(trial.rank, seconds[trial.rank])
        case = f"repeats={repeats}{f', drawn with seed {trial.seed}' if repeats > 3 else ''}"
        times = trial.call(repeats, trial.device, case=case, using=rehearsal.run)
        slowest = [max(column) for column in zip(*seconds, strict=True)]
        trial.value(times, slowest[1:])
        made = rehearsal.calls()
        complaint = "" if made == repeats + 1 else f"was called {made} times, should be {repeats + 1}"
        trial.criterion("value", complaint, "operation")
        trial.criterion("together", rehearsal.apart(), "the time")
        trial.criterion("untouched", rehearsal.settings)
        trial.agreement(times)
        trial.cost(calls={"barrier": repeats + 1, "all_reduce": 1})
    if not trial.on_all_ranks:  # the rest does not depend on the number of ranks
        return
    for error in (OperationFailed(), Stop()):
        rehearsal = _Rehearsal(trial.rank, [1.0] * 5, error)
        case = f"operation() raises {type(error).__name__} in its third call"
        trial.criterion("value", trial.call(4, trial.device, case=case, using=rehearsal.raises))
    nowhere = torch.device("meta")  # its tensors have no data, so they can't be sent
    rehearsal = _Rehearsal(trial.rank, [1.0] * 3, RuntimeError())
    case = "device='meta', from which nothing can be sent"
    complaint = trial.call(1, nowhere, case=case, using=rehearsal.raises)
    trial.criterion("value", "the tensor that ranks send is not on `device`" if complaint else "")


TIME_CALLS = Exercise(time_calls, examine_time_calls)


def forecast_step(gradients, timed, n):
    """Return the seconds, a float, that a training step of n ranks spends in its all-reduces.

    There is one all-reduce for each gradient, and they come one after another. gradients: a list
    with the bytes of each, perhaps empty. timed: {bytes: seconds} of two all-reduces that were timed
    on the same link, between 2 ranks; either may come first. n is at least 2. An all-reduce takes α
    seconds, the same for any n and any gradient, even one of 0 bytes, and β for each byte that a
    rank sends. Calculate in float64, as Python does.
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
    sizes = [4_000, 400_000]
    few, many = [4_000_000], [4 * (1 + size % 7) for size in range(40)] + [100_000]
    drawn = torch.randint(0, 2**16, (20,), generator=trial.generator()).tolist()  # of half precision, odd numbers
    odd = [2 * size for size in drawn] * 2 + [0, 2, 2**27 + 2]
    by_seed = f", sizes drawn with seed {trial.seed}"
    for n, gradients, link, seconds_of, note in (
        (2, few, Link(1e-4, 1e-9), _on_a_link, ""),
        (2, many, Link(1e-4, 1e-9), _on_a_link, ""),
        (4, few, Link(2e-5, 2e-9), _on_a_link, ""),
        (3, [3 * 2**30, 5 * 2**30], Link(2.0, 3e-9), _calculated, " of 3 and 5 GiB, α = 2 s"),
        (4096, odd, Link(1.2345678e-7, 3e-12), _calculated, f", α = 0.1 µs{by_seed}"),
        (3 + trial.seed % 97, odd, Link(2e-5, 3e-9), _calculated, by_seed),
        (4, [], Link(2e-5, 3e-9), _calculated, ""),
    ):
        sizes.reverse()  # now the larger one comes first, now the smaller
        timed = dict(zip(sizes, _calculated(2, link, sizes), strict=True))
        case = f"{len(gradients)} gradient{'s' if len(gradients) != 1 else ''}{note}, n={n}"
        seconds = trial.call(gradients, timed, n, case=case)
        expected = float(sum(seconds_of(n, link, gradients)))
        trial.criterion(
            "value", _difference(seconds, expected, 1e-9 if seconds_of is _calculated else 1e-5), "the result"
        )
        trial.cost(calls={})
        if trial.calls:  # it measures, and some of the next are too large for that
            return


def _difference(seconds: object, expected: float, tolerance: float) -> str:
    if not isinstance(seconds, (int, float)):
        return difference(seconds, expected)
    if abs(seconds - expected) <= tolerance * expected:
        return ""
    digits = 6 if f"{seconds:.6g}" != f"{expected:.6g}" else 17
    return f"is {seconds:.{digits}g}, should be {expected:.{digits}g}"


FORECAST_STEP = Exercise(forecast_step, examine_forecast_step)
EXERCISES = (TIME_CALLS, FORECAST_STEP)
