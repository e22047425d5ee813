"""Wrong answers to the exercises of lesson 14b."""

from tests.course.answers import WrongAnswer

WRONG_ANSWERS = {
    "shift": (
        WrongAnswer(
            "hands on to the left",
            "value",
            "the result is [10, 11, 12, 13], should be [30, 31, 32, 33]. Ranks 1, 2 and 3 too",
            {"return hand_on(mine, 1)": "return hand_on(mine, -1)"},
            n=(4,),
        ),
        WrongAnswer(
            "hands gradients on to the right as well",
            "value",
            "the gradient of `tensor` is that of rank 3's result, should be that of rank 1's",
            {"return hand_on(gradient, -1)": "return hand_on(gradient, 1)"},
            n=(4,),
        ),
        WrongAnswer(
            "autograd knows nothing of it",
            "runs",
            "Rank 0 raised RuntimeError: element 0 of tensors does not require grad and does not",
            {"return Shift.apply(tensor)": "return hand_on(tensor.detach(), 1)"},
        ),
        WrongAnswer(
            "every rank sends before it receives",
            "runs",
            "Rank 0 sent to rank 1 once, rank 1 received nothing",
            {"sending = dist.isend(": "dist.send(", "        sending.wait()\n": ""},
        ),
        WrongAnswer(
            "asks for the default group's numbers",
            "runs",
            "Rank 1 raised ValueError: rank 1 sends to itself",
            {"rank, n = dist.get_rank(group), dist": "rank, n = dist.get_rank(), dist"},
            n=(4,),
        ),
        WrongAnswer(
            "leaves the gradient where it is",
            "value",
            "the gradient of `tensor` is that of rank 0's result, should be that of rank 1's",
            {"return hand_on(gradient, -1)": "return gradient"},
        ),
    ),
    "send_rows": (
        WrongAnswer(
            "as many come as go",
            "runs",
            "raised ValueError: rank",
            {"received = arriving.tolist()": "received = counts"},
        ),
        WrongAnswer(
            "swaps what goes and what comes",
            "runs",
            "line 13, `dist.all_to_all_single(result, rows.contiguous(), counts, received,",
            {"rows.contiguous(), received, counts": "rows.contiguous(), counts, received"},
        ),
        WrongAnswer(
            "its own rows first",
            "value",
            "one row to each rank: the result is [102, 103, 2, 3",
            {
                "return result": (
                    "rank, parts = dist.get_rank(group), list(result.split(received))\n"
                    "    return torch.cat([parts.pop(rank), *parts])"
                )
            },
        ),
        WrongAnswer(
            "a rank without rows leaves",
            "runs",
            "Rank 1 called 1 collective, rank 0 none",
            {
                "    leaving = torch.tensor(counts, device=rows.device)\n": (
                    "    if not sum(counts):\n        return rows\n"
                    "    leaving = torch.tensor(counts, device=rows.device)\n"
                )
            },
        ),
    ),
}
