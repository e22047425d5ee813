"""Wrong answers to the exercises of lesson 00."""

from tests.course.answers import WrongAnswer

WRONG_ANSWERS = {
    "print_together": (
        WrongAnswer(
            "every rank prints",
            "value",
            "all ranks agree: what it prints is 'ready\\n', should be ''",
            body="print(text)",
        ),
        WrongAnswer(
            "rank 0 speaks for all, whatever the others have",
            "value",
            "all ranks differ: what it prints is 'x = 0\\n', should be 'rank 0: x = 0\\n'",
            body="""
            if rank == 0:
                print(text)
            """,
        ),
        WrongAnswer(
            "compares with rank 0's text only, so rank 0 never sees a difference",
            "value",
            "all ranks differ: what it prints is 'x = 0\\n', should be 'rank 0: x = 0\\n'",
            {"len(set(texts)) > 1": "text != texts[0]"},
        ),
        WrongAnswer(
            "only rank 0 asks for the texts, and waits for ever",
            "runs",
            "all ranks agree: Rank 0 did not come back",
            {"dist.all_gather_object(texts, text)": "if rank == 0:\n        dist.all_gather_object(texts, text)"},
        ),
        WrongAnswer(
            "takes texts for the same that differ in capital letters",
            "value",
            "only rank 1 differs: what it prints is 'ready\\n', should be 'rank 0: ready\\n'",
            {"len(set(texts)) > 1": "len({t.strip().lower() for t in texts}) > 1"},
        ),
        WrongAnswer(
            "forgets to say which rank it is",
            "value",
            "all ranks differ: what it prints is 'x = 0\\n', should be 'rank 0: x = 0\\n'",
            {'f"rank {rank}: {text}"': "text"},
        ),
    ),
    "get": (
        WrongAnswer(
            "forgets that after the last rank comes rank 0",
            "value",
            'among all ranks: get("next") is',
            {"(dist.get_rank(group) + 1) % dist.get_world_size(group)": "dist.get_rank(group) + 1"},
        ),
        WrongAnswer(
            "counts among all ranks although a mesh is given",
            "value",
            'mesh: get("next") is',
            {
                "dist.get_rank(group) + 1": "dist.get_rank() + 1",
                "% dist.get_world_size(group)": "% dist.get_world_size()",
            },
        ),
        WrongAnswer(
            "begins at its number among all ranks, which is right in a row of the mesh",
            "value",
            'in a column of a 2 × 2 mesh: get("next") is 0, should be 1. Rank 2 too',
            {"dist.get_rank(group) + 1": "dist.get_rank() + 1"},
            n=(4,),
        ),
        WrongAnswer(
            "the neighbour on the other side",
            "value",
            'among all ranks: get("next") is 3, should be 1. Ranks 1, 2 and 3 too',
            {"+ 1": "- 1"},
            n=(4,),
        ),
        WrongAnswer(
            "answers every other question with the neighbour",
            "value",
            'an unknown key: get("left") is 1, should be refused with ValueError',
            {'    if what == "next":\n        return': "    return"},
        ),
    ),
}
