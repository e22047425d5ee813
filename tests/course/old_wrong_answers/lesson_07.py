"""Wrong answers to the exercises of lesson 07."""

from tests.course.wrong_answer import WrongAnswer

WRONG_ANSWERS = {
    "time_calls": (
        WrongAnswer(
            "a StopIteration of operation() ends the list",
            fails="value",
            says="operation() raises Exhausted in its last call: rank 0 returned, should raise Exhausted.",
            edits={
                "    for call in range(repeats):\n": "    def timed(call):\n",
                "        taken[call] = clock() - began\n": "        taken[call] = clock() - began\n\n"
                "    list(map(timed, range(repeats)))\n",
            },
        ),
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
            "the ranks begin one after another",
            fails="together",
            says="Rank 0, repeats=3: the time of call 1 on the clock begins after a sleep behind its barrier.",
            edits={"        began = clock()\n": "        __import__('time').sleep(1e-4)\n        began = clock()\n"},
        ),
        WrongAnswer(
            "waits for the handle that operation() returns",
            fails="value",
            says="Rank 0, repeats=3: the time of call 2 on the clock has wait() in it.",
            edits={
                "        operation()\n        taken": "        handle = operation()\n"
                "        if hasattr(handle, 'wait'):\n            handle.wait()\n        taken"
            },
        ),
        WrongAnswer(
            "counts in a loop within the time",
            fails="value",
            says="Rank 0, repeats=3: the time of call 1 on the clock has a loop (line ",
            edits={
                "        began = clock()\n": "        began = clock()\n        left = 0\n"
                "        for each in range(repeats):\n            left += each > call\n"
            },
        ),
        WrongAnswer(
            "writes into the tensor within the time",
            fails="value",
            says="the time of call 1 on the clock has torch.Tensor.__setitem__() in it.",
            edits={
                "        began = clock()\n": "        taken[call] = -clock()\n",
                "taken[call] = clock() - began": "taken[call] += clock()",
            },
        ),
        WrongAnswer(
            "subtracts what a look at the clock takes",
            fails="value",
            says="clocks whose looks take time",
            edits={
                "    taken =": "    look = clock()\n    look = clock() - look\n    taken =",
                "clock() - began": "clock() - began - look",
            },
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
            also=("together",),
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
            says="rank 0 returned, should raise",
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
        WrongAnswer(
            "waits for the barrier when the clock runs",
            fails="together",
            says="Rank 0, repeats=3: the time of call 1 on the clock has the barrier in it.",
            edits={
                "dist.barrier()\n        began = clock()": "meeting = dist.barrier(async_op=True)\n"
                "        began = clock()\n        meeting.wait()"
            },
        ),
        WrongAnswer(
            "a barrier behind each operation, and before its end on the clock",
            fails="together",
            says="Rank 0, repeats=3: the time of call 1 on the clock has the barrier in it.",
            edits={
                "        dist.barrier()\n": "",
                "    taken = torch": "    dist.barrier()\n    taken = torch",
                "        taken[call]": "        dist.barrier()\n        taken[call]",
            },
        ),
        WrongAnswer(
            "sleeps a little when the clock runs",
            fails="value",
            says="Rank 0, repeats=3: the time of call 1 on the clock has sleep() in it.",
            edits={
                "        operation()\n        taken": "        time.sleep(1e-5)\n        operation()\n        taken",
                "    operation()\n    taken": "    import time\n    operation()\n    taken",
            },
        ),
        WrongAnswer(
            "a list of tensors",
            fails="value",
            says="Rank 0, repeats=3: the result at entry 0 is a Tensor, should be a float.",
            edits={"taken.tolist()": "list(taken)"},
        ),
        WrongAnswer(
            "switches garbage collection off for the operation",
            fails="untouched",
            says="calls operation() with garbage collection switched off",
            edits={
                "    operation()\n    taken": "    import gc\n    gc.disable()\n    operation()\n    taken",
                "    times =": "    gc.enable()\n    times =",
            },
        ),
        WrongAnswer(
            "switches gradients on for the operation",
            fails="untouched",
            says="called twice with gradients and gc switched off, repeats=1: calls operation() with gradients "
            "switched on",
            edits={"    operation()\n    taken": "    torch.set_grad_enabled(True)\n    operation()\n    taken"},
        ),
        WrongAnswer(
            "leaves the number of threads changed",
            fails="untouched",
            says="changes a setting of the process and leaves it so: the number of threads",
            edits={"    operation()\n    taken": "    torch.set_num_threads(2)\n    operation()\n    taken"},
        ),
        WrongAnswer(
            "keeps the times in float32",
            fails="value",
            says="drawn with seed",
            edits={"torch.float64": "torch.float32"},
        ),
        WrongAnswer(
            "has room for 64 times",
            fails="runs",
            says="rank 0 raised IndexError: index 64 is out of bounds",
            edits={"torch.zeros(repeats,": "torch.zeros(64,", "taken.tolist()": "taken.tolist()[:repeats]"},
        ),
        WrongAnswer(
            "swallows what the warm-up raises",
            fails="value",
            says="operation() raises OperationFailed in its first call: rank 0 returned, should raise OperationFailed.",
            edits={
                "    operation()\n    taken": (
                    "    try:\n        operation()\n    except Exception:\n        pass\n    taken"
                )
            },
        ),
    ),
    "forecast_step": (
        WrongAnswer(
            "a single gradient that is smaller than what was timed takes as long as that",
            fails="value",
            says="1 gradient, n=2, step 16 drawn with seed 1: the result is ",
            edits={
                "    sent =": "    if n == 2 and len(gradients) == 1 and gradients[0] < small:\n"
                "        return small_seconds\n    sent ="
            },
        ),
        WrongAnswer(
            "what was timed is looked up, though n ranks send more",
            fails="value",
            says="drawn with seed 1: the result is ",
            edits={
                "    seconds =": "    known = [each for each in gradients if each in timed]\n"
                "    sent -= 2 * (n - 1) / n * sum(known)\n    seconds = sum(timed[each] - alpha for each in known)\n"
                "    seconds +="
            },
        ),
        WrongAnswer(
            "refuses an α below 0, which is one of 0 that was rounded",
            fails="runs",
            says="α is 0, or below by rounding: Ranks 0, 1, 2 and 3 raised AssertionError",
            edits={"    sent = ": "    assert alpha >= 0\n    sent = "},
        ),
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
            says="41 gradients, n=2: the result is",
            edits={
                "sorted(timed.items())": "timed.items()",
                "(large_seconds - small_seconds)": "abs(large_seconds - small_seconds)",
            },
        ),
        WrongAnswer(
            "counts whole float32 numbers",
            fails="value",
            says="step 0 drawn with seed",
            edits={"sum(gradients)": "sum(each // 4 * 4 for each in gradients)"},
        ),
        WrongAnswer(
            "returns a tensor",
            fails="value",
            says="the result is a Tensor, should be a float",
            edits={"alpha * len(gradients) + beta * sent": "torch.tensor(alpha * len(gradients) + beta * sent)"},
        ),
        WrongAnswer(
            "knows the sizes that were timed first",
            fails="value",
            says="2 gradients of 3 and 5 GiB, α = 2 s, n=3: the result is",
            edits={"/ (large - small)": "/ 396_000"},
        ),
        WrongAnswer(
            "divides by the bandwidth, also where the time does not depend on the bytes",
            fails="runs",
            says="β = 0: Ranks 0, 1, 2 and 3 raised ZeroDivisionError",
            edits={
                "(large_seconds - small_seconds) / (large - small)": (
                    "1 / ((large - small) / (large_seconds - small_seconds))"
                )
            },
        ),
        WrongAnswer(
            "rounds to picoseconds",
            fails="value",
            says="α = 0: the result is",
            edits={"alpha * len(gradients) + beta * sent": "round(alpha * len(gradients) + beta * sent, 12)"},
        ),
        WrongAnswer(
            "calls the package's forecast",
            fails="own",
            says="The answer calls the package's transfer_seconds: write it yourself.",
            body="""
from scratch_ddp.instruments.cost import transfer_seconds

(small, small_seconds), (large, large_seconds) = sorted(timed.items())
beta = (large_seconds - small_seconds) / (large - small)
return transfer_seconds(small_seconds - beta * small, beta, len(gradients), 2 * (n - 1) / n * sum(gradients))
""",
        ),
    ),
}
