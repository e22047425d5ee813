"""Wrong answers to the exercises of lesson 07."""

from tests.course.wrong_answer import WrongAnswer

WRONG_ANSWERS = {
    "time_calls": (
        WrongAnswer(
            "each rank believes its own clock",
            fails="value",
            says="Rank 0, repeats=3: the result is [2.0, 2.0, 5.0], should be [5.0, 4.0, 6.0].",
            edits={"    dist.all_reduce(taken, op=dist.ReduceOp.MAX)\n": ""},
            also=("agreement",),
        ),
        WrongAnswer(
            "the sum over the ranks",
            fails="value",
            says="Rank 0, repeats=3: the result is [14.0, 10.0, 18.0], should be [5.0, 4.0, 6.0].",
            edits={"MAX": "SUM"},
        ),
        WrongAnswer(
            "counts the first call",
            fails="value",
            says="Rank 0, repeats=3: the result is [64.0, 5.0, 4.0], should be [5.0, 4.0, 6.0].",
            edits={"operation()\n    taken =": "taken ="},
        ),
        WrongAnswer(
            "from the first rank's beginning to the last one's end, by clocks that differ",
            fails="value",
            says="Rank 0, repeats=3: the result is [",
            edits={
                "taken[call] = clock() - began": "taken[call] = clock()\n        begins[call] = -began",
                "    for call": "    begins = taken.clone()\n    for call",
                "    times =": "    dist.all_reduce(begins, op=dist.ReduceOp.MAX)\n    taken += begins\n    times =",
            },
            also=("cost",),
        ),
        WrongAnswer(
            "begins when it likes",
            fails="together",
            says="Rank 0, repeats=3: the time of call 1 on the clock does not begin with a barrier.",
            edits={"        dist.barrier()\n": ""},
        ),
        WrongAnswer(
            "measures the waiting for the others as well",
            fails="together",
            says="Rank 0, repeats=3: the time of call 1 on the clock has the barrier in it.",
            edits={"dist.barrier()\n        began = clock()": "began = clock()\n        dist.barrier()"},
        ),
        WrongAnswer(
            "asks the others after each call",
            fails="cost",
            says="4 ranks, repeats=3: calls all_reduce 3 times, budget 1.",
            edits={"    dist.all_reduce(taken, op": "        dist.all_reduce(taken[call], op"},
        ),
        WrongAnswer(
            "goes on until its own time is up: the ranks make different numbers of calls",
            fails="runs",
            says="did not come back",
            edits={"for call in range(repeats):": "call = 0\n    while taken.sum() < 2 * repeats:"},
        ),
        WrongAnswer(
            "does not wait for the barrier",
            fails="waits",
            says="barrier was started and never waited for",
            edits={"dist.barrier()": "dist.barrier(async_op=True)"},
        ),
        WrongAnswer(
            "sorts the times",
            fails="value",
            says="Rank 0, repeats=3: the result is [4.0, 5.0, 6.0], should be [5.0, 4.0, 6.0].",
            edits={"taken.tolist()": "sorted(taken.tolist())"},
        ),
        WrongAnswer(
            "goes on after an exception",
            fails="value",
            says="operation() raises OperationFailed in its third call: returned, should raise OperationFailed.",
            edits={
                "        operation()\n        taken": "        try:\n"
                "            operation()\n        except Exception:\n            pass\n        taken"
            },
        ),
        WrongAnswer(
            "takes no notice of the device",
            fails="value",
            says="the tensor that ranks send is not on `device`",
            edits={", device=device": ""},
        ),
        WrongAnswer(
            "switches gradients off for the operation",
            fails="untouched",
            says="calls operation() with gradients switched off",
            edits={"        operation()\n": "        with torch.no_grad():\n            operation()\n"},
        ),
    ),
    "forecast_step": (
        WrongAnswer(
            "2·S at any number of ranks, as published",
            fails="value",
            says="1 gradient, n=2: the result is 0.0081, should be 0.0041.",
            edits={"2 * (n - 1) / n": "2"},
        ),
        WrongAnswer(
            "S at any number of ranks",
            fails="value",
            says="1 gradient, n=4: the result is",
            edits={"2 * (n - 1) / n * sum": "sum"},
        ),
        WrongAnswer(
            "one α for all messages together",
            fails="value",
            says="41 gradients, n=2: the result is",
            edits={"alpha * len(gradients)": "alpha"},
        ),
        WrongAnswer(
            "bandwidth from the larger transfer alone",
            fails="value",
            says="1 gradient, n=2: the result is",
            edits={"(large_seconds - small_seconds) / (large - small)": "large_seconds / large"},
        ),
        WrongAnswer(
            "measures here what was to be forecast",
            fails="cost",
            says="calls all_reduce",
            edits={
                "    sent =": "    for size in gradients:\n        dist.all_reduce(torch.zeros(size // 4))\n    sent ="
            },
        ),
        WrongAnswer(
            "empties the caller's dict",
            fails="untouched",
            says="has other entries than before",
            edits={"    seconds = alpha": "    timed.clear()\n    seconds = alpha"},
        ),
        WrongAnswer(
            "expects the smaller of the two first",
            fails="value",
            says="1 gradient, n=2: the result is",
            edits={
                "sorted(timed.items())": "timed.items()",
                "(large_seconds - small_seconds)": "abs(large_seconds - small_seconds)",
            },
        ),
        WrongAnswer(
            "counts whole float32 numbers",
            fails="value",
            says="sizes drawn with seed",
            edits={"sum(gradients)": "sum(each // 4 * 4 for each in gradients)"},
        ),
        WrongAnswer(
            "returns a tensor",
            fails="value",
            says="the result is a Tensor, should be a float",
            edits={"alpha * len(gradients) + beta * sent": "torch.tensor(alpha * len(gradients) + beta * sent)"},
        ),
    ),
}
