"""Wrong answers to the exercises of lesson 17."""

from tests.course.answers import WrongAnswer

WRONG_ANSWERS = {
    "which_ranks": (
        WrongAnswer(
            "along the first dimension first",
            "value",
            "dp of 2 × 2 × 2: the result",
            {"[names.index(dim) + 1 :]": "[: names.index(dim)]"},
        ),
        WrongAnswer(
            "its own size counts, too", "value", "dp of 2 × 2 × 2: the result", {"index(dim) + 1 :": "index(dim) :"}
        ),
        WrongAnswer("always neighbours", "value", "dp of 2 × 2 × 2: the result", {"rank // apart": "rank"}),
    ),
    "mesh_norm": (
        WrongAnswer("what is not cut counts tp times", "value", "some are whole: the result", {" / tp": ""}),
        WrongAnswer(
            "the sum of the ranks' norms",
            "value",
            "slices alone: the result",
            {"dist.all_reduce(total)": "total.sqrt_()\n    dist.all_reduce(total)", "total.sqrt()": "total"},
        ),
        WrongAnswer("this rank's norm", "value", "slices alone: the result", {"    dist.all_reduce(total)\n": ""}),
    ),
    "best_order": (
        WrongAnswer(
            "the most bytes come first",
            "value",
            "tp sends most: bytes that leave",
            {"min(permutations": "max(permutations"},
        ),
        WrongAnswer(
            "the one that sends most is last, whatever its size",
            "value",
            "bytes that leave",
            {"min(permutations(mesh), key=leaving)": "sorted(mesh, key=sent.get)"},
        ),
        WrongAnswer("no order", "valid", "is no order of", {"list(min(permutations(mesh), key=leaving))": "max(sent)"}),
    ),
}
