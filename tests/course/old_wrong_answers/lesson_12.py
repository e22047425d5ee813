"""Wrong answers to the exercises of lesson 12."""

from tests.course.wrong_answer import WrongAnswer

WRONG_ANSWERS = {
    "split_step": (
        WrongAnswer(
            "each part by itself: what overlaps is counted twice",
            fails="sum",
            says="a message behind backward, asked about rank 0: the parts add up to 11, the step is 8",
            also=("value",),
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
            fails="value",
            says="a rank that waits, asked about rank 0: [computing, waiting, transfer, idle] is [3.0, 0.0, 5.0, 0.0]",
            edits={"max(called for called, _ in same)": "same[rank][0]"},
        ),
        WrongAnswer(
            "ready when the first rank has called",
            fails="value",
            says="should be [3.0, 3.0, 2.0, 0.0]",
            edits={"max(called": "min(called"},
        ),
        WrongAnswer(
            "communication before computing",
            fails="value",
            says="a message behind backward, asked about rank 0: [computing, waiting, transfer, idle] is",
            edits={
                "        if any(since <= a and b <= until for since, until in computing):\n            part = 0\n"
                "        elif any(since <= a and b <= ended for _, since, ended in mine):\n            part = 2\n"
                "        elif any(called <= a and b <= ended for called, _, ended in mine):\n            part = 1\n": (
                    "        if any(since <= a and b <= ended for _, since, ended in mine):\n            part = 2\n"
                    "        elif any(called <= a and b <= ended for called, _, ended in mine):\n            part = 1\n"
                    "        elif any(since <= a and b <= until for since, until in computing):\n            part = 0\n"
                )
            },
        ),
        WrongAnswer(
            "waiting before transfer",
            fails="value",
            says="two collectives, the second not ready, asked about rank 0",
            edits={
                "        elif any(since <= a and b <= ended for _, since, ended in mine):\n            part = 2\n"
                "        elif any(called <= a and b <= ended for called, _, ended in mine):\n            part = 1\n": (
                    "        elif any(called <= a and b <= since for called, since, _ in mine):\n            part = 1\n"
                    "        elif any(since <= a and b <= ended for _, since, ended in mine):\n            part = 2\n"
                )
            },
        ),
        WrongAnswer(
            "beyond the step",
            fails="sum",
            says="the parts add up to 9, the step is 4",
            edits={" if start <= at <= end": ""},
            also=("value",),
        ),
        WrongAnswer(
            "no idle time",
            fails="sum",
            says="nothing recorded, asked about rank 0: the parts add up to 0, the step is 8",
            edits={"            part = 3\n": "            continue\n"},
            also=("value",),
        ),
        WrongAnswer(
            "the calls of rank 0",
            fails="value",
            says="asked about rank 2",
            edits={"zip(calls[rank], ready": "zip(calls[0], ready"},
        ),
        WrongAnswer(
            "ended when the last rank has ended",
            fails="value",
            says="[computing, waiting, transfer, idle] is",
            edits={
                "for (called, ended), since in zip(calls[rank], ready, strict=True)": (
                    "for k, ((called, _), since) in enumerate(zip(calls[rank], ready, strict=True))\n"
                    "        for ended in [max(each[k][1] for each in calls)]"
                )
            },
        ),
        WrongAnswer(
            "sorts the caller's list",
            fails="untouched",
            says="has other entries than before",
            edits={"    start, end = step\n": "    start, end = step\n    computing.sort()\n"},
        ),
        WrongAnswer(
            "times relative to zero",
            fails="sum",
            says="add up to",
            edits={"    moments = {start, end,": "    start = max(start, 0.0)\n    moments = {start, end,"},
            also=("value",),
        ),
    ),
    "find_straggler": (
        WrongAnswer(
            "least time in communication: the rank that is last in sum",
            fails="value",
            says="the straggler is",
            body="""
                everyones = [torch.empty_like(called) for _ in range(dist.get_world_size(group))]
                dist.all_gather(everyones, called, group=group)
                sums = [int(each.sum()) for each in everyones]
                return sums.index(max(sums)) if max(sums) > min(sums) else None
            """,
        ),
        WrongAnswer(
            "the rank that is last most often",
            fails="value",
            says="the straggler is",
            edits={"+= sum(last - at for at in same)": "+= last > min(same)"},
        ),
        WrongAnswer(
            "the longest wait of one rank",
            fails="value",
            says="the straggler is",
            edits={
                "waited_for[same.index(last)] += sum(last - at for at in same)": (
                    "waited_for[same.index(last)] = max(waited_for[same.index(last)], last - min(same))"
                )
            },
        ),
        WrongAnswer(
            "in float32",
            fails="value",
            says="the straggler is",
            edits={"each.tolist() for each": "each.float().tolist() for each"},
        ),
        WrongAnswer(
            "somebody is always to blame",
            fails="value",
            says="nobody is late",
            edits={" if most else None": ""},
        ),
        WrongAnswer(
            "the highest of several",
            fails="value",
            says="the straggler is",
            edits={
                "waited_for[same.index(last)]": "waited_for[len(same) - 1 - same[::-1].index(last)]",
                "waited_for.index(most)": "len(waited_for) - 1 - waited_for[::-1].index(most)",
            },
        ),
        WrongAnswer(
            "the rank that waits most",
            fails="value",
            says="the straggler is",
            edits={"last = max(same)": "last = min(same)", "sum(last - at": "sum(at - last"},
        ),
        WrongAnswer(
            "each rank names itself if it is late",
            fails="value",
            says="the straggler is None",
            edits={
                "return waited_for.index(most) if most else None": (
                    "me = dist.get_rank(group)\n    return me if most and waited_for.index(most) == me else None"
                )
            },
            also=("agreement",),
        ),
        WrongAnswer(
            "among all ranks, not in the group",
            fails="value",
            says="in a group of ranks 1, 2 and 3",
            edits={
                "return waited_for.index(most)": "return dist.get_process_group_ranks(group)[waited_for.index(most)]"
            },
        ),
        WrongAnswer(
            "one collective after the other",
            fails="cost",
            says="calls all_reduce",
            edits={
                "for same in zip(*(each.tolist() for each in everyones), strict=True):\n        last = max(same)": (
                    "for same in zip(*(each.tolist() for each in everyones), strict=True):\n"
                    "        last = torch.tensor(max(same))\n"
                    "        dist.all_reduce(last, dist.ReduceOp.MAX, group=group)\n        last = int(last)"
                )
            },
        ),
        WrongAnswer(
            "a tensor",
            fails="value",
            says="is a Tensor, should be an int",
            edits={"return waited_for.index(most) if": "return torch.tensor(waited_for.index(most)) if"},
        ),
        WrongAnswer(
            "gathers a long trace in pieces",
            fails="cost",
            says="70,001 collectives: calls all_gather twice, budget 1.",
            edits={
                "dist.all_gather(everyones, called, group=group)": (
                    "pieces = [each.split(2**16) for each in (called, *everyones)]\n"
                    "    for mine, *theirs in zip(*pieces):\n"
                    "        dist.all_gather(theirs, mine, group=group)"
                ),
            },
        ),
    ),
    "sync_batch_norm": (
        WrongAnswer(
            "each rank's own statistics",
            fails="value",
            says="running_mean is",
            edits={
                "            total = mine.clone()\n            dist.all_reduce(total, group=group)\n": (
                    "            total = mine.clone()\n"
                ),
            },
            also=("agreement",),
        ),
        WrongAnswer(
            "the gradient of the total stays here",
            fails="value",
            says="x.grad",
            edits={
                "            total = gradient.clone()\n"
                "            dist.all_reduce(total, group=group)  # each rank's result depends on the total\n"
                "            return total": "            return gradient"
            },
        ),
        WrongAnswer(
            "the mean of the ranks' means",
            fails="value",
            says="running_mean is",
            edits={
                "exact.sum(others), exact.square().sum(others), count]": (
                    "exact.mean(others).nan_to_num(), exact.square().mean(others).nan_to_num(), count]"
                ),
                "total[:features] / count": "total[:features] / dist.get_world_size(group)",
                "total[features:-1] / count": "total[features:-1] / dist.get_world_size(group)",
            },
        ),
        WrongAnswer(
            "two all-reduces",
            fails="cost",
            says="calls all_reduce twice, budget 1",
            edits={
                "            total = mine.clone()\n            dist.all_reduce(total, group=group)\n": (
                    "            total = mine.clone()\n            half = len(total) // 2\n"
                    "            for part in (total[:half], total[half:]):\n"
                    "                dist.all_reduce(part, group=group)\n"
                )
            },
        ),
        WrongAnswer(
            "all rows travel",
            fails="cost",
            says="budget",
            edits={
                "    if norm.training:\n        exact = x.double()": (
                    "    if norm.training:\n"
                    "        rows = [None] * dist.get_world_size(group)\n"
                    "        dist.all_gather_object(rows, x.detach(), group=group)\n        exact = x.double()"
                )
            },
        ),
        WrongAnswer(
            "the biased variance in the running one",
            fails="value",
            says="running_var",
            edits={"variance * count / (count - 1)": "variance"},
        ),
        WrongAnswer(
            "the unbiased variance for normalizing",
            fails="value",
            says="the output",
            edits={
                "variance = (total[features:-1] / count - mean.square()).clamp(min=0)": (
                    "variance = (total[features:-1] / count - mean.square()).clamp(min=0) * count / (count - 1)"
                ),
                "variance * count / (count - 1))": "variance)",
            },
        ),
        WrongAnswer(
            "running statistics of this rank",
            fails="value",
            says="running_mean",
            edits={"(norm.running_mean, mean)": "(norm.running_mean, exact.mean(others).nan_to_num())"},
            also=("agreement",),
        ),
        WrongAnswer(
            "eval mode like training",
            fails="cost",
            says="calls all_reduce once, budget 0",
            edits={"    if norm.training:": "    if True:"},
            also=("untouched", "value"),
        ),
        WrongAnswer(
            "momentum the other way round",
            fails="value",
            says="running_mean",
            edits={"share = norm.momentum": "share = 1 - norm.momentum"},
        ),
        WrongAnswer(
            "sums in float32",
            fails="value",
            says="float32 about 1000",
            edits={"exact = x.double()  # the difference of two large sums needs all digits": "exact = x * 1"},
        ),
        WrongAnswer(
            "without the batches' count",
            fails="value",
            says="num_batches_tracked",
            edits={"norm.num_batches_tracked += 1": "pass"},
        ),
    ),
}
