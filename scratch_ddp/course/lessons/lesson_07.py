"""Lesson 07, what a message costs: a timer for collectives, and the forecast of a training step."""

from unittest import mock

import torch
import torch.distributed as dist

from scratch_ddp.course.exercise import Exercise


def time_calls(operation, repeats, clock, device):
    """Return the seconds of `repeats` calls of operation(): the same list on all ranks.

    The slowest rank's time counts. The ranks begin each call together. One more comes
    first and does not count, as it is slower. clock(): seconds, a float64 that may
    differ between ranks by any amount. device: for what is sent.
    Cost: at most a dist.barrier for each call of operation, and one dist.all_reduce.
    """
    # How do ranks begin together? Whose time counts, and how do the others hear of it?
    taken = torch.zeros(1 + repeats, dtype=torch.float64, device=device)
    for call in range(1 + repeats):
        dist.barrier()
        began = clock()
        operation()
        taken[call] = clock() - began
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    times = taken.tolist()[1:]  # without the first call
    # end of the answer
    return times


def _slow_ranks(at):
    yield "the last rank is slow", ([at.rank + seconds for seconds in (1.0, 2.0, 3.0)],)
    yield "each rank is slow once", ([1.0 + 4.0 * (call == at.rank) for call in range(at.n)],)


def _timed(answer, seconds):
    """The clock only moves with what the rank does: calls, the first of them of 50 s, and barriers of 100 s."""
    left, passed, barrier = iter([50.0, *seconds]), [1000.0 * dist.get_rank()], dist.barrier

    def counted(*args, **options):
        passed.append(100.0)
        return barrier(*args, **options)

    with mock.patch.object(dist, "barrier", counted):
        times = answer(lambda: passed.append(next(left, 0.0)), len(seconds), lambda: sum(passed), torch.device("cpu"))
    yield "value", "the list", times
    yield "together", "the number of barriers", min(passed.count(100.0), len(seconds))


def forecast_step(gradients, timed, n):
    """Return the seconds that a step of n ranks spends in all-reduces, one a gradient.

    gradients: the bytes of each. timed: {bytes: seconds} of two all-reduces of 2 ranks
    on the same link. An all-reduce takes α seconds, the same for any n, and β for each
    byte that a rank sends.
    """
    # What do two times say about α and β? How many bytes does each of n ranks send?
    (small, small_seconds), (large, large_seconds) = sorted(timed.items())
    beta = (large_seconds - small_seconds) / (large - small)  # of 2 ranks, each sends all bytes
    alpha = small_seconds - beta * small
    sent = 2 * (n - 1) / n * sum(gradients)
    seconds = alpha * len(gradients) + beta * sent
    # end of the answer
    return seconds


_TIMED = {4_000: 1.04e-4, 400_000: 5e-4}  # α = 100 µs, β = 1 ns
_FORECASTS = (  # the last two: only bandwidth, only latency
    ([1_000_000], _TIMED, 2),
    ([8_000, 4_000_000, 0], dict(reversed(_TIMED.items())), 8),
    ([1_000_000], {1_000: 1e-6, 1_000_000: 1e-3}, 4),
    ([1_000] * 10, {1_000: 1e-4, 1_000_000: 1e-4}, 8),
)
EXERCISES = (Exercise(time_calls, _slow_ranks, use=_timed), Exercise(forecast_step, _FORECASTS, close=1e-9))
