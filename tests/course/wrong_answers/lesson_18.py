"""Wrong answers to the exercises of lesson 18."""

from tests.course.answers import WrongAnswer

WRONG_ANSWERS = {
    "outer_step": (
        WrongAnswer(
            "uphill", "value", "the mean of the ranks: meeting 0: params[0]", {"(last - mine)": "(mine - last)"}
        ),
        WrongAnswer(
            "the sum", "value", "the mean of the ranks: meeting 0: params[0]", {" / dist.get_world_size()": ""}
        ),
        WrongAnswer(
            "momentum without Nesterov", "value", "with momentum: meeting 0", {"gradient + momentum * speed": "speed"}
        ),
        WrongAnswer(
            "agreed stays behind",
            "value",
            "the mean of the ranks: meeting 0: agreed[0]",
            {"last.sub_(": "mine.copy_(last - ", "        mine.copy_(last)\n": ""},
        ),
        WrongAnswer(
            "the ranks agree on nothing: each keeps its own",
            "value",
            "the mean of the ranks: meeting 0: params[0]",
            {"        mine.copy_(last)\n": ""},
        ),
        WrongAnswer(
            "the velocities are averaged, too",
            "cost",
            "budget",
            {"        last.sub_": "        dist.all_reduce(speed.div_(dist.get_world_size()))\n        last.sub_"},
        ),
    ),
    "send_largest": (
        WrongAnswer(
            "without feedback",
            "value",
            "2 of 6: step 0: residual",
            {"residual += gradient\n": "residual.copy_(gradient)\n", "residual[places] = 0": "residual.zero_()"},
        ),
        WrongAnswer("what was sent is kept, too", "value", "step 0: residual", {"    residual[places] = 0\n": ""}),
        WrongAnswer("the sum", "value", "step 0: gradient", {"all_values / n": "all_values"}),
        WrongAnswer(
            "largest without its sign",
            "value",
            "step 0: gradient",
            {"values = residual[places]": "values = residual.abs()[places]"},
        ),
        WrongAnswer("the largest positive ones", "value", "step", {"residual.abs().topk": "residual.topk"}),
        WrongAnswer(
            "two ranks at one place: one is lost",
            "value",
            "step",
            {".index_add_(0, all_places, all_values / n)": "[all_places] = all_values / n"},
        ),
        WrongAnswer(
            "an all-reduce of everything",
            "cost",
            "budget",
            {
                "    dist.all_gather(list(all_values.split(k)), values)\n": "",
                "    dist.all_gather(list(all_places.split(k)), places)\n": "",
                ".index_add_(0, all_places, all_values / n)": "[places] = values / n\n    dist.all_reduce(gradient)",
            },
        ),
    ),
    "steps_between": (
        WrongAnswer("half of the ring", "value", "two ranks: the result is", {"2 * (n - 1)": "n - 1"}),
        WrongAnswer("all bytes in each round", "value", "two ranks: the result is", {"rounds / n": "rounds"}),
        WrongAnswer("one latency", "value", "few bytes: the result is", {"rounds * latency": "latency"}),
        WrongAnswer("rounded down", "value", "the result is", {"ceil(seconds / compute)": "int(seconds / compute)"}),
        WrongAnswer(
            "never is seldom",
            "value",
            "a quick link: the result is 0",
            {"max(1, ceil(seconds / compute))": "round(seconds / compute)"},
        ),
    ),
}
