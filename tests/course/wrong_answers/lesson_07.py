"""Wrong answers to the exercises of lesson 07."""

from tests.course.answers import WrongAnswer

WRONG_ANSWERS = {
    "time_calls": (
        WrongAnswer(
            "each rank believes its own clock",
            fails="value",
            says="the last rank is slow: the list is",
            edits={
                "    dist.all_reduce(taken, op=dist.ReduceOp.MAX)\n": "",
            },
        ),
        WrongAnswer(
            "the sum over the ranks",
            fails="value",
            says="the last rank is slow: the list is",
            edits={
                "MAX": "SUM",
            },
        ),
        WrongAnswer(
            "counts the first call",
            fails="value",
            says="the last rank is slow: the list is",
            edits={
                "tolist()[1:]": "tolist()[:-1]",
            },
        ),
        WrongAnswer(
            "begins when it likes",
            fails="together",
            says="the last rank is slow: the number of barriers is 0, should be 3",
            edits={
                "        dist.barrier()\n": "",
            },
        ),
        WrongAnswer(
            "measures the waiting for the others as well",
            fails="value",
            says="the last rank is slow: the list is",
            edits={
                "dist.barrier()\n        began = clock()": "began = clock()\n        dist.barrier()",
            },
        ),
    ),
    "forecast_step": (
        WrongAnswer(
            "2·S at any number of ranks, as published",
            fails="value",
            says="one gradient, 2 ranks: the result is",
            edits={
                "2 * (n - 1) / n": "2",
            },
        ),
        WrongAnswer(
            "S at any number of ranks",
            fails="value",
            says="one gradient, 4 ranks, no latency: the result is 0.001, should be",
            edits={
                "2 * (n - 1) / n * sum": "sum",
            },
        ),
        WrongAnswer(
            "one α for all messages together",
            fails="value",
            says="ten gradients, 8 ranks, only latency: the result is",
            edits={
                "alpha * len(gradients)": "alpha",
            },
        ),
        WrongAnswer(
            "bandwidth from the larger transfer alone",
            fails="value",
            says="one gradient, 2 ranks: the result is",
            edits={
                "(large_seconds - small_seconds) / (large - small)": "large_seconds / large",
            },
        ),
    ),
}
