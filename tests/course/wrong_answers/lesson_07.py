"""Wrong answers to the exercises of lesson 07."""

from tests.course.answers import WrongAnswer

WRONG_ANSWERS = {
    "time_calls": (
        WrongAnswer(
            "each rank believes its own clock",
            "value",
            "the last rank is slow: the list is",
            {"    dist.all_reduce(taken, op=dist.ReduceOp.MAX)\n": ""},
        ),
        WrongAnswer("the sum over the ranks", "value", "the last rank is slow: the list is", {"MAX": "SUM"}),
        WrongAnswer(
            "counts the first call", "value", "the last rank is slow: the list is", {"tolist()[1:]": "tolist()[:-1]"}
        ),
        WrongAnswer(
            "begins when it likes",
            "together",
            "the last rank is slow: the number of barriers is 0, should be 3",
            {"        dist.barrier()\n": ""},
        ),
        WrongAnswer(
            "measures the waiting for the others as well",
            "value",
            "the last rank is slow: the list is",
            {"dist.barrier()\n        began = clock()": "began = clock()\n        dist.barrier()"},
        ),
    ),
    "forecast_step": (
        WrongAnswer(
            "2·S at any number of ranks, as published",
            "value",
            "one gradient, 2 ranks: the result is",
            {"2 * (n - 1) / n": "2"},
        ),
        WrongAnswer(
            "S at any number of ranks",
            "value",
            "one gradient, 4 ranks, no latency: the result is 0.001, should be",
            {"2 * (n - 1) / n * sum": "sum"},
        ),
        WrongAnswer(
            "one α for all messages together",
            "value",
            "ten gradients, 8 ranks, only latency: the result is",
            {"alpha * len(gradients)": "alpha"},
        ),
        WrongAnswer(
            "bandwidth from the larger transfer alone",
            "value",
            "one gradient, 2 ranks: the result is",
            {"(large_seconds - small_seconds) / (large - small)": "large_seconds / large"},
        ),
    ),
}
