"""Wrong answers to the exercises of lesson 00."""

from tests.course.answers import WrongAnswer

WRONG_ANSWERS = {
    "print_together": (
        WrongAnswer(
            "every rank prints",
            fails="value",
            says="all ranks agree: what it prints is 'ready\\n', should be ''",
            body="""
            print(text)
            """,
        ),
        WrongAnswer(
            "rank 0 speaks for all, whatever the others have",
            fails="value",
            says="all ranks differ: what it prints is 'x = 0\\n', should be 'rank 0: x = 0\\n'",
            body="""
            if rank == 0:
                print(text)
            """,
        ),
        WrongAnswer(
            "compares with rank 0's text only, so rank 0 never sees a difference",
            fails="value",
            says="all ranks differ: what it prints is 'x = 0\\n', should be 'rank 0: x = 0\\n'",
            edits={
                "len(set(texts)) > 1": "text != texts[0]",
            },
        ),
        WrongAnswer(
            "only rank 0 asks for the texts, and waits for ever",
            fails="runs",
            says="all ranks agree: Rank 0 did not come back",
            edits={
                "dist.all_gather_object(texts, text)": "if rank == 0:\n        dist.all_gather_object(texts, text)",
            },
        ),
        WrongAnswer(
            "takes texts for the same that differ in capital letters",
            fails="value",
            says="only rank 1 differs: what it prints is 'ready\\n', should be 'rank 0: ready\\n'",
            edits={
                "len(set(texts)) > 1": "len({t.strip().lower() for t in texts}) > 1",
            },
        ),
        WrongAnswer(
            "forgets to say which rank it is",
            fails="value",
            says="all ranks differ: what it prints is 'x = 0\\n', should be 'rank 0: x = 0\\n'",
            edits={
                'f"rank {rank}: {text}"': "text",
            },
        ),
    ),
    "get": (
        WrongAnswer(
            "forgets that after the last rank comes rank 0",
            fails="value",
            says='among all ranks: get("next") is',
            edits={
                "(dist.get_rank(group) + 1) % dist.get_world_size(group)": "dist.get_rank(group) + 1",
            },
        ),
        WrongAnswer(
            "counts among all ranks although a mesh is given",
            fails="value",
            says='mesh: get("next") is',
            edits={
                "dist.get_rank(group) + 1": "dist.get_rank() + 1",
                "% dist.get_world_size(group)": "% dist.get_world_size()",
            },
        ),
        WrongAnswer(
            "begins at its number among all ranks, which is right in a row of the mesh",
            fails="value",
            says='in a column of a 2 × 2 mesh: get("next") is 0, should be 1. Rank 2 too',
            edits={
                "dist.get_rank(group) + 1": "dist.get_rank() + 1",
            },
            n=(4,),
        ),
        WrongAnswer(
            "the neighbour on the other side",
            fails="value",
            says='among all ranks: get("next") is 3, should be 1. Ranks 1, 2 and 3 too',
            edits={
                "+ 1": "- 1",
            },
            n=(4,),
        ),
        WrongAnswer(
            "answers every other question with the neighbour",
            fails="value",
            says='an unknown key: get("left") is 1, should be refused with ValueError',
            edits={
                '    if what == "next":\n        return': "    return",
            },
        ),
    ),
}
