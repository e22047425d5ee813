"""Wrong answers to the exercises of lesson 12."""

from tests.course.answers import WrongAnswer

WRONG_ANSWERS = {
    "split_step": (
        WrongAnswer(
            "each part by itself: what overlaps is counted twice",
            "value",
            "a message during backward: waiting is 1, should be 0.0",
            body="""
            def seconds(intervals):
                return sum(min(b, step[1]) - max(a, step[0]) for a, b in intervals if b > step[0] and a < step[1])

            ready = [max(called for called, _ in same) for same in zip(*calls, strict=True)]
            pairs = list(zip(calls[rank], ready, strict=True))
            waiting = seconds((called, since) for (called, _), since in pairs)
            transfer = seconds((since, ended) for (_, ended), since in pairs)
            computed = seconds(computing)
            return [computed, waiting, transfer, max(0.0, step[1] - step[0] - computed - waiting - transfer)]
            """,
        ),
        WrongAnswer(
            "ready as soon as this rank has called",
            "value",
            "a rank that waits: waiting is 0.0, should be 3.0",
            {"max(called for called, _ in same)": "same[rank][0]"},
        ),
        WrongAnswer(
            "beyond the step",
            "value",
            "called before the step, ended after it: waiting is 4.0, should be 2.0",
            {" if start <= at <= end": ""},
        ),
        WrongAnswer(
            "ended when the last rank has ended",
            "value",
            "rank 1 ends later: transfer is 4.0, should be 2.0",
            {
                "for (called, ended), since in zip(calls[rank], ready, strict=True)": (
                    "for k, ((called, _), since) in enumerate(zip(calls[rank], "
                    "ready, strict=True))\n"
                    "        for ended in [max(each[k][1] for each in calls)]"
                )
            },
        ),
        WrongAnswer(
            "waiting before transfer",
            "value",
            "two collectives, the second not ready: waiting is 5.0, should be 2.0",
            {
                (
                    "        elif any(since <= a and b <= ended for _, since, ended in mine):\n"
                    "            part = 2\n"
                    "        elif any(called <= a and b <= ended for called, _, ended in mine):\n"
                    "            part = 1\n"
                ): (
                    "        elif any(called <= a and b <= since for called, "
                    "since, _ in mine):\n            part = 1\n"
                    "        elif any(since <= a and b <= ended for _, since, "
                    "ended in mine):\n            part = 2\n"
                )
            },
        ),
        WrongAnswer(
            "communication before computing",
            "value",
            "a message during backward: computing is 2.0, should be 6.0",
            {
                (
                    "        if any(since <= a and b <= until for since, until in computing):\n"
                    "            part = 0\n"
                    "        elif any(since <= a and b <= ended for _, since, ended in mine):\n"
                    "            part = 2\n"
                    "        elif any(called <= a and b <= ended for called, _, ended in mine):\n"
                    "            part = 1\n"
                ): (
                    "        if any(since <= a and b <= ended for _, since, "
                    "ended in mine):\n            part = 2\n"
                    "        elif any(called <= a and b <= ended for called, _, "
                    "ended in mine):\n            part = 1\n"
                    "        elif any(since <= a and b <= until for since, until "
                    "in computing):\n            part = 0\n"
                )
            },
        ),
    ),
    "find_straggler": (
        WrongAnswer(
            "the rank whose calls are the latest in sum",
            "value",
            "rank 0 calls late each time, and each time another later still: the result is 0, should be 1",
            body="""
            everyones = [torch.empty_like(called) for _ in range(dist.get_world_size(group))]
            dist.all_gather(everyones, called, group=group)
            sums = [int(each.sum()) for each in everyones]
            return sums.index(max(sums)) if max(sums) > min(sums) else None
            """,
            n=(4,),
        ),
        WrongAnswer(
            "the rank that is last most often",
            "value",
            "rank 0 is late often, the last rank once and for long: the result is 0, should be",
            {"+= sum(last - at for at in same)": "+= last > min(same)"},
        ),
        WrongAnswer(
            "the rank that waits most",
            "value",
            "the last rank is late: the result is 0, should be",
            {"last = max(same)": "last = min(same)", "sum(last - at": "sum(at - last"},
        ),
        WrongAnswer(
            "among all ranks, not in the group",
            "value",
            "the result is 3, should be 2. Ranks 2 and 3 too",
            {"return waited_for.index(most)": "return dist.get_process_group_ranks(group)[waited_for.index(most)]"},
            n=(4,),
        ),
        WrongAnswer(
            "the highest of several",
            "value",
            "two cost the others as much: the result is",
            {
                "waited_for[same.index(last)]": "waited_for[len(same) - 1 - same[::-1].index(last)]",
                "waited_for.index(most)": "len(waited_for) - 1 - waited_for[::-1].index(most)",
            },
        ),
    ),
    "culprit": (
        WrongAnswer(
            "who waits least is the straggler, whatever it does",
            "value",
            "loader planted: the fault is 'straggler', should be 'loader'",
            body="""
            ranks = range(len(steps[0]))
            waits = [sum(step[rank]['waiting'] for step in steps) for rank in ranks]
            if max(waits) > 0:
                return 'straggler', waits.index(min(waits))
            return 'last bucket', None
            """,
        ),
        WrongAnswer(
            "looks at the first step only",
            "value",
            "straggler planted: the rank is 2, should be 3",
            {
                "for rank in ranks] for step in steps]\n": "for rank in ranks] for step in steps[:1]]\n",
                "len(steps) / 2": "0",
            },
        ),
        WrongAnswer(
            "does not look at the messages' sizes",
            "value",
            "item() planted: the fault is 'last bucket', should be '.item()'",
            {'small > sum(step[0]["transfer"] for step in steps) / 2': "len(messages) > 1000"},
        ),
        WrongAnswer(
            "names a rank where it is no rank's",
            "value",
            "uneven batches planted: the rank is 2, should be None",
            {'return "uneven batches", None': 'return "uneven batches", often'},
        ),
        WrongAnswer(
            "whoever is slowest most often, however seldom",
            "value",
            "uneven batches planted: the fault is 'straggler', should be 'uneven batches'",
            {"slowest.count(often) > len(steps) / 2": "often is not None"},
        ),
    ),
    "sync_batch_norm": (
        WrongAnswer(
            "each rank's own statistics",
            "value",
            "rank r has 2 + r rows: the output is",
            {"dist.all_reduce(total, group=group)\n": "\n"},
        ),
        WrongAnswer(
            "the gradient of the total stays here",
            "value",
            "rank r has 2 + r rows: the gradient of x is",
            {
                (
                    "            total = gradient.clone()\n"
                    "            dist.all_reduce(total, group=group)  # each rank's result depends on "
                    "the total\n            return total"
                ): "            return gradient"
            },
        ),
        WrongAnswer(
            "the mean of the ranks' means",
            "value",
            "rank r has 2 + r rows: the output is",
            {
                "exact.sum(others), exact.square().sum(others), count]": (
                    "exact.mean(others).nan_to_num(), exact.square().mean(others).nan_to_num(), count]"
                ),
                "total[:features] / count": "total[:features] / dist.get_world_size(group)",
                "total[features:-1] / count": "total[features:-1] / dist.get_world_size(group)",
            },
        ),
        WrongAnswer(
            "two all-reduces",
            "cost",
            "ranks, rank r has 2 + r rows: rank 0 calls all_reduce 3 times, budget 2",
            {
                "            total = mine.clone()\n            dist.all_reduce(total, group=group)\n": (
                    "            total = mine.clone()\n"
                    "            half = len(total) // 2\n"
                    "            for part in (total[:half], total[half:]):\n"
                    "                dist.all_reduce(part, group=group)\n"
                )
            },
        ),
        WrongAnswer(
            "the biased variance in the running one",
            "value",
            "rank r has 2 + r rows: norm: 'running_var' is",
            {"variance * count / (count - 1)": "variance"},
        ),
    ),
}
